"""The recipes that ship with the package: YAML files, each with its launch command as first comment."""
