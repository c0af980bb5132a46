"""`python -m inferscale` is the `inferscale` command."""

from inferscale.cli import main

main()
