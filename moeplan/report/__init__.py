"""What commands print: tables on stdout, JSON, progress on stderr."""
