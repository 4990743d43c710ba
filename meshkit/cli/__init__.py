"""The command line `v4mesh`: one module per command, imported only when that command runs."""
