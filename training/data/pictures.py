"""Pictures of cases: from the name in a row to what a model is shown.

A row names its pictures and never stores them. ``faces/<file>`` is a photo of the packed folder of
faces (`training.data.faces`); any other name is a path below the folder of corpora. Nothing is read
before it is asked for, and of what was read only so much is kept as fits in a limit.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from compeer_core.cer import CaseUtterance
from compeer_core.errors import ConfigError, ImageError
from compeer_core.images import Image, read_image
from compeer_core.taxonomy import Emotion
from training.data.faces import Face, face_class_of, read_faces

FACES = "faces/"
"""How the name of a photo of the packed folder begins."""
LARGEST_FILE = 64 << 20
"""In bytes. Larger files are no pictures of a conversation and are not read."""
_KEPT = 64 << 20


class Pictures:
    """Opens pictures by their names, from any thread.

    Attributes:
        unreadable: Why a picture could not be shown, by its name; only filled with
            ``skip_unreadable``.
        kept_bytes: The size of what is kept.
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        faces: Path | None = None,
        *,
        skip_unreadable: bool = False,
        kept_bytes: int = _KEPT,
    ) -> None:
        """Remember where pictures lie; no file is touched yet.

        Args:
            data_dir: The folder that names of files are below; None if there is none.
            faces: The packed folder of faces; None if there is none.
            skip_unreadable: Leave out a picture that is missing or broken, and note it in
                `unreadable`, instead of raising. A name that leads out of the folder raises anyway.
            kept_bytes: How much of the pictures opened last is kept for another time.
        """
        self.unreadable: dict[str, str] = {}
        self.kept_bytes = 0
        self._data_dir = data_dir
        self._faces_folder = faces
        self._skip_unreadable = skip_unreadable
        self._lock = threading.RLock()
        self._kept: OrderedDict[str, Image] = OrderedDict()
        self._limit = kept_bytes
        self._faces: Mapping[str, Face] | None = None
        self._classes: Mapping[Emotion, str] | None = None
        self._photos: Mapping[tuple[str, str], Sequence[str]] = {}

    def open(self, name: str) -> Image:
        """Return a picture by its name.

        Raises:
            ConfigError: There is no such picture, it cannot be read, or its name is no path below
                the folder of corpora.
        """
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name]
            try:
                image = read_image(self._face(name) if name.startswith(FACES) else self._file(name))
            except ImageError as error:
                raise _Unreadable(f"picture {name}: {error}") from error
            self._keep(name, image)
            return image

    def shown(self, history: Iterable[CaseUtterance]) -> tuple[tuple[Image, ...], ...]:
        """Return the opened pictures of each utterance, as `Case.dialogue` takes them.

        Raises:
            ConfigError: As `open`.
        """
        return tuple(
            tuple(image for name in said.images if (image := self._open_or_note(name)) is not None)
            for said in history
        )

    def photo_for(self, emotion: Emotion, split: str, rng: np.random.Generator) -> str | None:
        """Draw a face whose expression goes with an emotion, and return its name.

        Photos do not cross splits: a row of ``train`` gets one of the photos to train with, any
        other row one of the photos kept from training.

        Returns:
            None if there is no photo of that class.

        Raises:
            ConfigError: The folder of faces is not named, or incomplete.
        """
        with self._lock:
            self._read_faces()
        assert self._classes is not None
        part = "train" if split == "train" else "valid"
        photos = self._photos.get((part, self._classes[emotion]), ())
        return photos[int(rng.integers(len(photos)))] if photos else None

    def _open_or_note(self, name: str) -> Image | None:
        if name in self.unreadable:
            return None
        try:
            return self.open(name)
        except _Unreadable as error:
            if not self._skip_unreadable:
                raise
            self.unreadable[name] = str(error)
            return None

    def _keep(self, name: str, image: Image) -> None:
        self._kept[name] = image
        self.kept_bytes += len(image.data)
        while self.kept_bytes > self._limit:
            _, oldest = self._kept.popitem(last=False)
            self.kept_bytes -= len(oldest.data)

    def _face(self, name: str) -> bytes:
        face = self._read_faces().get(name.removeprefix(FACES))
        if face is None:
            raise _Unreadable(f"picture {name}: not in the folder of faces {self._faces_folder}")
        return face.data

    def _read_faces(self) -> Mapping[str, Face]:
        if self._faces is None:
            if self._faces_folder is None:
                raise ConfigError("rows show faces, but no folder of packed faces is named")
            self._classes = face_class_of(self._faces_folder)
            found = read_faces(self._faces_folder)
            photos: dict[tuple[str, str], list[str]] = {}
            for face in found:
                photos.setdefault((face.split, face.face_class), []).append(f"{FACES}{face.file}")
            self._photos = photos
            self._faces = {face.file: face for face in found}
        return self._faces

    def _file(self, name: str) -> bytes:
        if self._data_dir is None:
            raise ConfigError(f"picture {name}: no folder of corpora is named")
        inner = PurePosixPath(name)
        # A backslash separates folders on Windows only; a name that has one is the same nowhere.
        outside = inner.is_absolute() or ".." in inner.parts or "\\" in name or "\0" in name
        root = self._data_dir.resolve()
        if outside or not (path := root.joinpath(inner).resolve()).is_relative_to(root):
            raise ConfigError(f"picture {name!r}: leads out of the folder of corpora")
        try:
            if not path.is_file():  # nor a pipe, which would never end
                raise _Unreadable(f"picture {name}: no such file below {self._data_dir}")
            if path.stat().st_size > LARGEST_FILE:
                raise _Unreadable(f"picture {name}: larger than {LARGEST_FILE >> 20} MiB")
            return path.read_bytes()
        except OSError as error:
            raise _Unreadable(f"picture {name}: cannot be read ({error.strerror})") from error


class _Unreadable(ConfigError):
    """A picture that is missing or broken, which may be left out; not a name that is forbidden."""
