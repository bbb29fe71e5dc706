"""The subcommands of `ep-ops`."""
