"""All metadata is in setup.cfg; this file is where the build of the CUDA core will hook in."""

from setuptools import setup

setup()
