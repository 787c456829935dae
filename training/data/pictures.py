"""Pictures of CER rows: from the name in a row to the image that a model sees.

A row names its pictures and never stores them. ``faces/<file>`` is a photo of the packed folder of
faces (`training.data.faces`); any other name is a path below the folder of corpora. Pictures are
read on demand, and the most recent ones are cached up to a size limit.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from compeer_core.cer import Case, CaseUtterance
from compeer_core.dialogue import Dialogue
from compeer_core.errors import ConfigError, ImageError
from compeer_core.images import Image, read_image
from compeer_core.taxonomy import Emotion
from training.data.faces import Face, face_class_of, read_faces, read_readings

FACES = "faces/"
"""Prefix of the names of photos in the packed folder."""
LARGEST_FILE = 64 << 20
"""In bytes. Larger files are not read: no picture of a conversation is as large."""
_CACHE_BYTES = 64 << 20

Photos = Mapping[tuple[str, str], Sequence[str]]
"""Names of photos as `CaseUtterance.images` has them, by split ("train", "valid") and class."""


def read_photos(folder: Path, readings: Path | None = None) -> Photos:
    """Return the names of the photos that may be drawn.

    Args:
        folder: The packed faces.
        readings: `readings.json` of a `vision` run; only photos that the image tower classifies
            correctly are returned. None returns all.

    Raises:
        ConfigError: A file is missing or names an unknown class.
    """
    read_as = None if readings is None else read_readings(readings)
    return _photo_names(
        face
        for face in read_faces(folder)
        if read_as is None or read_as.get(face.file) == face.face_class
    )


def _photo_names(faces: Iterable[Face]) -> Photos:
    photos: dict[tuple[str, str], list[str]] = {}
    for face in faces:
        photos.setdefault((face.split, face.face_class), []).append(f"{FACES}{face.file}")
    return photos


class Pictures:
    """Opens pictures by their names, from any thread.

    Attributes:
        unreadable: Why a picture could not be shown, by its name; only filled with
            ``skip_unreadable``.
        kept_bytes: Size of the cache.
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        faces: Path | None = None,
        *,
        skip_unreadable: bool = False,
        kept_bytes: int = _CACHE_BYTES,
    ) -> None:
        """Set the folders; no file is opened yet.

        Args:
            data_dir: Folder that other names are paths below; None if there is none.
            faces: The packed folder of faces; None if there is none.
            skip_unreadable: Skip a picture that is missing or broken, and note it in `unreadable`,
                instead of raising. A name that leads out of the folder always raises.
            kept_bytes: Size limit of the cache.
        """
        self.unreadable: dict[str, str] = {}
        self.kept_bytes = 0
        self._data_dir = data_dir
        self._faces_folder = faces
        self._skip_unreadable = skip_unreadable
        self._lock = threading.RLock()
        self._cache: OrderedDict[str, Image] = OrderedDict()
        self._limit = kept_bytes
        self._faces: Mapping[str, Face] | None = None
        self._classes: Mapping[Emotion, str] | None = None
        self._photos: Photos = {}

    def open(self, name: str) -> Image:
        """Return a picture by its name.

        Raises:
            ConfigError: There is no such picture, it cannot be read, or its name is not a path
                below the folder of corpora.
        """
        with self._lock:
            if name in self._cache:
                self._cache.move_to_end(name)
                return self._cache[name]
            try:
                image = read_image(self._face(name) if name.startswith(FACES) else self._file(name))
            except ImageError as error:
                raise _Unreadable(f"picture {name}: {error}") from error
            self._keep(name, image)
            return image

    def dialogue(self, case: Case) -> Dialogue:
        """Return the history of a case with its pictures.

        Raises:
            ConfigError: As `open`.
        """
        return case.dialogue(self.shown(case.history))

    def shown(self, history: Iterable[CaseUtterance]) -> tuple[tuple[Image, ...], ...]:
        """Return the pictures of each utterance, as `Case.dialogue` takes them.

        Raises:
            ConfigError: As `open`.
        """
        return tuple(
            tuple(
                image
                for name in utterance.images
                if (image := self._open_or_note(name)) is not None
            )
            for utterance in history
        )

    def photo_for(self, emotion: Emotion, split: str, rng: np.random.Generator) -> str | None:
        """Draw the name of a face whose expression fits an emotion.

        Photos do not cross splits: rows of ``train`` get training photos, all others held-out ones.

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
        self._cache[name] = image
        self.kept_bytes += len(image.data)
        while self.kept_bytes > self._limit:
            _, oldest = self._cache.popitem(last=False)
            self.kept_bytes -= len(oldest.data)

    def _face(self, name: str) -> bytes:
        face = self._read_faces().get(name.removeprefix(FACES))
        if face is None:
            raise _Unreadable(f"picture {name}: not in the folder of faces {self._faces_folder}")
        return face.data

    def _read_faces(self) -> Mapping[str, Face]:
        if self._faces is None:
            if self._faces_folder is None:
                raise ConfigError("rows show faces: name the folder of packed faces (`faces`)")
            self._classes = face_class_of(self._faces_folder)
            faces = read_faces(self._faces_folder)
            self._photos = _photo_names(faces)
            self._faces = {face.file: face for face in faces}
        return self._faces

    def _file(self, name: str) -> bytes:
        if self._data_dir is None:
            raise ConfigError(f"picture {name}: name the folder of corpora (`data_dir`)")
        inner = PurePosixPath(name)
        # A backslash separates folders on Windows only, so such a name is not portable.
        outside = inner.is_absolute() or ".." in inner.parts or "\\" in name or "\0" in name
        root = self._data_dir.resolve()
        if outside or not (path := root.joinpath(inner).resolve()).is_relative_to(root):
            raise ConfigError(f"picture {name!r}: leads out of the folder of corpora")
        try:
            if not path.is_file():  # a pipe would block forever
                raise _Unreadable(f"picture {name}: no such file below {self._data_dir}")
            if path.stat().st_size > LARGEST_FILE:
                raise _Unreadable(f"picture {name}: larger than {LARGEST_FILE >> 20} MiB")
            return path.read_bytes()
        except OSError as error:
            raise _Unreadable(f"picture {name}: cannot be read ({error.strerror})") from error


class _Unreadable(ConfigError):
    """A picture is missing or broken, which `skip_unreadable` tolerates; a forbidden name is not."""
