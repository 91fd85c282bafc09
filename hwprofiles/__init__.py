"""Imported as ``moeplan.hwprofiles``; see CONTRIBUTING.md for what this folder holds and may import."""

if __name__ == "hwprofiles":
    raise ImportError("import moeplan.hwprofiles instead of hwprofiles: the folder is the source of that package")
