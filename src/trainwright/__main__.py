"""`python -m trainwright ...`, for launchers: `torchrun -m trainwright train config.yaml`."""

from trainwright.cli.main import app

if __name__ == "__main__":
    app(prog_name="trainwright")
