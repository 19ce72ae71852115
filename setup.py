"""Cuboid: 3-D tensor parallelism for unmodified Hugging Face models, inside DeepSpeed or ColossalAI."""

import ast
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup


def constants(module: str) -> list[Any]:
    """What a module of the package assigns at its top level. It isn't imported, since nothing is installed yet."""
    source = (Path(__file__).parent / "plugin" / "cuboid" / f"{module}.py").read_text(encoding="utf-8")
    return [ast.literal_eval(node.value) for node in ast.parse(source).body if isinstance(node, ast.Assign)]


(VERSION,) = constants("version")
# What `import cuboid` checks as well.
(PYTHON, _), RANGES, OPTIONAL = constants("requirements")

setup(
    name="cuboid",
    version=VERSION,
    description=__doc__.strip(),
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords=["tensor parallelism", "pipeline parallelism", "DeepSpeed", "transformers", "large language models"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=PYTHON,
    package_dir={"": "plugin", "cuboid_patches": "patches/cuboid_patches"},
    packages=[*find_packages("plugin"), "cuboid_patches"],
    package_data={
        "cuboid": ["py.typed"],
        "cuboid.models.certification": ["certified.json", "certified_meshes.json"],
        "cuboid_patches": ["py.typed"],
    },
    install_requires=[
        *(f"{package}{versions}" for package, versions in RANGES.items()),
        "filelock>=3.12",
        "hjson>=3.1",
        "packaging>=23",
        "pydantic>=2.9",
        "pyyaml>=6",
        "safetensors>=0.5",
        "tokenizers>=0.21",
        "typer>=0.19",
        "rich>=13",
        "tqdm>=4.66",
        "matplotlib>=3.9",
        "psutil>=5.9",
        "wrapt>=1.16,<3",
    ],
    extras_require={
        "lora": [f"peft{OPTIONAL['peft']}"],
        "qlora": [f"{package}{OPTIONAL[package]}" for package in ("peft", "bitsandbytes")],
        "dev": [
            "pytest>=8",
            "pytest-xdist>=3.8",
            "hypothesis>=6.100",
            f"peft{OPTIONAL['peft']}",
            "ruff>=0.12",
            "import-linter>=2.6",
            "mypy>=1.15",
            "types-PyYAML",
            "types-psutil",
        ],
    },
    entry_points={"console_scripts": ["cuboid=cuboid.cli:app"]},
)
