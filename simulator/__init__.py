"""Imported as ``moeplan.simulator``; see CONTRIBUTING.md for what this folder holds and may import."""

if __name__ == "simulator":
    raise ImportError("import moeplan.simulator instead of simulator: the folder is the source of that package")
