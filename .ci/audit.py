"""Look for known vulnerabilities of the packages that users of Perdure install: `python .ci/audit.py`, or `make audit`.

pip-audit asks the advisory database of the package index. Exit code 0: none is known. 1: some are, and are listed.
3: the database did not answer, or does not know one of the packages, so that nothing is known of it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

UNREACHABLE = 3

_NAME = re.compile(r"[\w.-]+")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_requirements(package: str) -> set[str]:
    """Return the names of all that the package requires, with its extras, and is installed here."""
    found: set[str] = set()
    open_names = [package]
    while open_names:
        name = normal(open_names.pop())
        if name in found:
            continue
        try:
            requirements = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # of an extra, or of another platform
        found.add(name)
        own = name == package
        names = [match[0] for text in requirements if own or "extra ==" not in text if (match := _NAME.match(text))]
        open_names += names
    return found - {package}


def main() -> int:
    names = installed_requirements("perdure")
    program = str(Path(sys.executable).with_name("pip-audit"))
    command = [program, "--format", "json", "--progress-spinner", "off", "--skip-editable", "--timeout", "15"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        answers = json.loads(asked.stdout)["dependencies"]
    except ValueError:
        sys.stdout.write("the advisory database did not answer\n")
        return UNREACHABLE
    ours = [answer for answer in answers if normal(answer["name"]) in names]
    unknown = sorted(answer["name"] for answer in ours if "skip_reason" in answer)
    found = [
        f"{answer['name']} {answer['version']}: {hole['id']}, fixed in {', '.join(hole['fix_versions']) or 'none yet'}"
        for answer in ours
        for hole in answer.get("vulns", ())
    ]
    sys.stdout.write("".join(f"{line}\n" for line in found))
    sys.stdout.write(
        f"{len(ours) - len(unknown)} of {len(ours)} packages audited, {len(found)} known vulnerabilities\n"
    )
    return 1 if found else UNREACHABLE if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
