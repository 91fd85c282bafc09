"""Imported as ``moeplan.executor``; see CONTRIBUTING.md for what this folder holds and may import."""

if __name__ == "executor":
    raise ImportError("import moeplan.executor instead of executor: the folder is the source of that package")
