"""`python -m stoker_worker` is `stoker-worker`."""

from stoker_worker.cli.main import main

if __name__ == "__main__":
    main(prog_name="stoker-worker")
