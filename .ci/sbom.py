"""Write the software bill of materials of a wheel: `python .ci/sbom.py WHEEL OUTPUT [EXTRA ...]`, or `make dist`.

The wheel is installed with its extras into an environment of its own, so the list has the releases that a user gets on
that day. Its form is CycloneDX 1.6 in JSON (https://cyclonedx.org/docs/1.6/json/), made by cyclonedx-py. Without
extras, all that workers and dashboards use are installed; frameworks of adapters are not.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

EXTRAS = ("embedded", "metrics", "cron", "encryption", "artifacts", "vectors", "postgres", "embeddings", "web", "otel")


def main(arguments: list[str]) -> None:
    wheel, output, *extras = arguments
    with tempfile.TemporaryDirectory() as temporary:
        venv.create(temporary, with_pip=True)
        python = str(Path(temporary, "bin", "python"))
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, f"{wheel}[{','.join(extras or EXTRAS)}]"], check=True)
        remove = [python, "-m", "pip", "uninstall", "--quiet", "--yes", "--disable-pip-version-check", "pip"]
        subprocess.run(remove, check=True)  # it is not part of the product; setuptools may be
        command = [str(Path(sys.executable).with_name("cyclonedx-py")), "environment", python, "--validate"]
        command += ["--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "library", "--sv", "1.6"]
        subprocess.run([*command, "--short-PURLs", "--output-reproducible", "-o", output], check=True)
    names = [component["name"] for component in json.loads(Path(output).read_bytes())["components"]]
    sys.stdout.write(f"{output}: {len(names)} components\n")


if __name__ == "__main__":
    main(sys.argv[1:])
