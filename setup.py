"""The door for ``python setup.py`` and old installers. What is installed is said in pyproject.toml."""

import shutil

from setuptools import setup
from setuptools.command.build import build


class CleanBuild(build):
    """Starts from an empty folder: what an earlier build left in it would get into the wheel."""

    def run(self) -> None:
        """Remove the leftovers and build."""
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


setup(cmdclass={"build": CleanBuild})
