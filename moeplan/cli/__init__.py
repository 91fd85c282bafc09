"""Commands: one module each, imported when its command runs."""
