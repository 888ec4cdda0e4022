"""The `halogen` command, one file per subcommand."""
