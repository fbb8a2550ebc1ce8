"""What a run has left in a folder: what looks finished and is not, what is lost, what is left behind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

STAGES = ("merged", "calibrated")
Files = Mapping[str, bytes]
USERS: Files = {  # what a user keeps in a run's folder
    "notes.txt": b"my own notes",
    "mine/data.csv": b"1,2,3",
    "merged/mine.txt": b"beside the weights",
    "calibrated/evaluation/mine.json": b"{}",
    "heads/mine.txt": b"beside the heads",
}


def files(folder: Path) -> dict[str, bytes]:
    """Name -> content of every file below the folder."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def results(folder: Path) -> dict[str, bytes]:
    """Those that a run has made and that time does not change; the user's are left out."""
    made = files(folder)
    return {
        name: content
        for name, content in made.items()
        if name.split("/")[0] in (*STAGES, "heads") and name not in USERS
    }


def put(folder: Path, users: Files) -> None:
    """Write the user's files."""
    for name, content in users.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def unfinished(folder: Path, *whole: Files) -> list[str]:
    """What looks finished in the folder of a run that was stopped and is none of the `whole` results."""
    found = []
    for stage in STAGES:
        if not (folder / stage).is_dir() or not _looks_finished(folder / stage):
            continue
        present = _of(results(folder), stage)
        if not any(_same(present, _of(one, stage)) for one in whole):
            found.append(f"{stage}/ looks finished and is not: {', '.join(sorted(present))}")
    for path in sorted((folder / "heads").rglob("*")) if (folder / "heads").is_dir() else []:
        name = path.relative_to(folder).as_posix()
        known = [one[name] for one in whole if name in one]
        if path.is_file() and name not in USERS and path.read_bytes() not in known:
            found.append(f"{name} is not that of a whole run")
    report = folder / "report.json"
    if report.exists():
        try:
            checkpoint = Path(json.loads(report.read_bytes())["checkpoint"]).name
        except (ValueError, KeyError):
            return [*found, "report.json is not whole"]
        if not _looks_finished(folder / checkpoint):
            found.append(f"report.json tells of {checkpoint}/, which is not whole")
    return found


def lost(folder: Path, users: Files, *, moved: bool) -> list[str]:
    """The user's files that are not what they were. `moved`: they may be on the way, in a hidden folder."""
    present = files(folder)
    gone = [name for name, content in users.items() if present.get(name) != content]
    if moved:
        hidden = {(name.split("/")[-1], content) for name, content in present.items() if ".partial-" in name}
        gone = [name for name in gone if (name.split("/")[-1], users[name]) not in hidden]
    return [f"{name} of the user is not what it was" for name in gone]


def stray(folder: Path, expected: Files, users: Files) -> list[str]:
    """Files that neither an undisturbed run nor the user has put there, and hidden folders, even empty."""
    extra = files(folder).keys() - expected.keys() - users.keys()
    hidden = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_dir() and (".partial-" in path.name or path.name in ("work", "begun"))
        if any(path.iterdir()) or ".partial-" in path.name
    }
    return [f"{name} was left behind" for name in sorted(extra | hidden)]


def different(folder: Path, expected: Files) -> list[str]:
    """Results that are not byte for byte those of the undisturbed run."""
    present = results(folder)
    names = sorted(present.keys() | expected.keys())
    return [f"{name} is not what it should be" for name in names if present.get(name) != expected.get(name)]


def _looks_finished(folder: Path) -> bool:
    """A program finds weights to load there, or the manifest says that they were made."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        return True
    if index.exists():
        return True
    try:
        return "fingerprint" in json.loads((folder / "manifest.json").read_bytes())
    except (OSError, ValueError):
        return False


def _of(made: Files, stage: str) -> dict[str, bytes]:
    """Without the manifest and the model card, which are written anew in place: that of results which are
    being removed keeps its list alone, and scores are added to a card when they are known."""
    beside = (f"{stage}/manifest.json", f"{stage}/README.md")
    return {
        name: content for name, content in made.items() if name.startswith(f"{stage}/") and name not in beside
    }


def _same(present: Files, whole: Files) -> bool:
    return bool(whole) and dict(present) == dict(whole)
