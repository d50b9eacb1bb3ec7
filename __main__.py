"""`python -m draftsmith` and the module launchers (torchrun, deepspeed, accelerate)."""

from draftsmith.cli import main

if __name__ == "__main__":
    main()
