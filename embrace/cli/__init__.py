"""The `embrace` command: thin, and light to import on the smallest device."""
