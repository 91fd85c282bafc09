"""Imported as ``moeplan.planner``; see CONTRIBUTING.md for what this folder holds and may import."""

if __name__ == "planner":
    raise ImportError("import moeplan.planner instead of planner: the folder is the source of that package")
