"""Videos before any model processes them: reading, the choice of frames, decoding and times.

Filter, rollout and training must see the same frames at the same times. Therefore frames are chosen and decoded here,
and processors and engines get them as already sampled. A video is a file, which PyAV decodes, or a list of images.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rltrain.common.errors import DataError
from rltrain.common.images import file_bytes, image_entry, reading
from rltrain.config.schema import DataConfig
from rltrain.data.images import MOST_ROW_PIXELS, bounded_size, check_pixels, image_size, open_image

# Options of a video in its row, by verl's names. They replace the keys data.video_*, whose maxima they cannot raise.
_OPTIONS = ("fps", "min_frames", "max_frames", "min_pixels", "max_pixels")
_OTHER_KEYS = {"type", "video", "bytes", "path", "nframes", *_OPTIONS}
# Minimum number of frames of a video that has as many, as in Qwen's code.
_LEAST_FRAMES = 4
# Other demuxers of FFmpeg may open further files or addresses.
_FORMATS = "mov,mp4,matroska,webm,avi,mpegts,mpeg,flv,asf,ogg"


@dataclass(frozen=True)
class VideoSettings:
    """Keys ``data.video_*``: frames per second, maximum number of frames, and bounds of their pixels."""

    fps: float = 2.0
    max_frames: int = 64
    min_pixels: int | None = None
    max_pixels: int | None = None


def video_settings(data: DataConfig) -> VideoSettings:
    """Return the settings of the configuration."""
    return VideoSettings(data.video_fps, data.video_max_frames, data.video_min_pixels, data.video_max_pixels)


class VideoSize(NamedTuple):
    """Size of a video, and the options of its row (NaN: unset)."""

    width: float
    height: float
    num_frames: float
    """Number of all its frames."""
    frame_rate: float
    """Frames per second."""
    fps: float
    """Frames to sample per second; infinite for a list of images."""
    min_frames: float
    max_frames: float
    min_pixels: float
    max_pixels: float


@dataclass(frozen=True)
class Clip:
    """Frames to take of a video, an even number, each scaled to ``width`` times ``height`` pixels."""

    width: int
    height: int
    indices: tuple[int, ...]
    num_frames: int
    """Number of all frames of the video."""
    frame_rate: float

    @classmethod
    def of(cls, size: VideoSize, settings: VideoSettings, unit: int) -> Clip:
        """Choose evenly spaced frames. unit: side length of a token in pixels. Raises DataError if they are too large.

        The number is that of Qwen's code: frames per second times duration, within the bounds, rounded down to pairs.
        """
        options = {name: value for name, value in size._asdict().items() if not math.isnan(value)}
        frame_rate = float(options.get("frame_rate", settings.fps))
        total, most = int(size.num_frames), int(min(options.get("max_frames", math.inf), settings.max_frames))
        wanted = max(total / frame_rate * options.get("fps", settings.fps), options.get("min_frames", _LEAST_FRAMES))
        number = max(2, int(min(wanted, most, total)) // 2 * 2)
        largest = [bound for bound in (options.get("max_pixels"), settings.max_pixels) if bound]
        smallest = options.get("min_pixels", settings.min_pixels)
        bounds = (int(smallest) if smallest else None, int(min(largest)) if largest else None)
        width, height = bounded_size((int(size.width), int(size.height)), *bounds, unit)
        if number * width * height > MOST_ROW_PIXELS:
            raise DataError(
                f"{number} frames of {width} x {height} pixels exceed the {MOST_ROW_PIXELS:,} pixels of a row. Lower "
                "data.video_max_pixels or data.video_max_frames."
            )
        indices = np.linspace(0, total - 1, number).round().astype(int)
        return cls(width, height, tuple(indices.tolist()), total, frame_rate)

    @property
    def metadata(self) -> dict[str, Any]:
        """Fields of transformers' ``VideoMetadata``."""
        return {"total_num_frames": self.num_frames, "fps": self.frame_rate, "frames_indices": list(self.indices)}

    def times(self, merged: int) -> list[float]:
        """Return the mean time of every ``merged`` frames, in seconds."""
        times = [index / self.frame_rate for index in self.indices]
        times += times[-1:] * (-len(times) % merged)
        return [(times[i] + times[i + merged - 1]) / 2 for i in range(0, len(times), merged)]


@dataclass(frozen=True)
class Video:
    """Sampled frames [n, height, width, 3] (uint8)."""

    frames: np.ndarray
    size: Clip


@dataclass(frozen=True)
class StoredVideo:
    """The file of a video, or the files of its frames, and options of its row."""

    files: tuple[bytes, ...]
    is_list: bool
    options: Mapping[str, float]
    size: VideoSize | None = None
    """None: not measured yet."""

    @classmethod
    def read(cls, video: Any, folder: Path) -> StoredVideo:
        """Read a video of a row: {"video": path, bytes or images} with options, or a path or bytes alone.

        Paths are relative to ``folder``. Raises DataError for an unreadable file or an unknown option.
        """
        entry = video if isinstance(video, Mapping) else {"video": video}
        given = {name: value for name, value in entry.items() if value is not None}
        if unknown := given.keys() - _OTHER_KEYS:
            raise DataError(f"option {min(unknown)!r} of a video is not supported; supported: {', '.join(_OPTIONS)}.")
        if "nframes" in given:
            given |= {"min_frames": given["nframes"], "max_frames": given["nframes"], "fps": math.inf}
        options = {name: given[name] for name in _OPTIONS if name in given}
        if wrong := [name for name, value in options.items() if not isinstance(value, int | float) or not value > 0]:
            raise DataError(f"option {wrong[0]}={options[wrong[0]]!r} of a video must be a number above 0.")
        source = given.get("video", given)
        if not isinstance(source, list):
            return cls((file_bytes(image_entry(source, folder), video=True),), False, options)
        if not source:
            raise DataError("it is an empty list of frames.")
        return cls(tuple(file_bytes(image_entry(frame, folder)) for frame in source), True, options)

    def measure(self) -> VideoSize:
        """Return the size. A file is decoded completely. Raises DataError if that fails."""
        options = [float(self.options.get(name, math.nan)) for name in _OPTIONS]
        if not self.is_list:
            return VideoSize(*self._measure_file(), *options)
        sizes = {image_size(file) for file in self.files}
        if len(sizes) > 1:
            raise DataError(f"its frames have different sizes: {', '.join(map(str, sorted(sizes)))}.")
        # The option fps of a list is the rate of its frames, which are all taken.
        return VideoSize(*sizes.pop(), len(self.files), options[0], math.inf, *options[1:])

    def _measure_file(self) -> tuple[int, int, int, float]:
        """Return width, height, number of frames, and frames per second."""
        number, size, rate = 0, (0, 0), math.nan
        for frame, frame_rate in _decoded(self.files[0]):
            if not number:
                size, rate = (frame.width, frame.height), frame_rate
                check_pixels(frame)
            number += 1
        if not number:
            raise DataError("it has no frames.")
        return (*size, number, rate)

    def open(self, clip: Clip) -> Video:
        """Decode the frames of ``clip``. Raises DataError if they cannot be decoded."""
        chosen = {index: frame.convert("RGB") for index, frame in self._images(set(clip.indices))}
        if missing := set(clip.indices) - chosen.keys():
            raise DataError(f"frame {min(missing)} of {clip.num_frames} cannot be decoded.")
        size = (clip.width, clip.height)
        scaled = {
            index: np.asarray(frame if frame.size == size else frame.resize(size, resample=3))
            for index, frame in chosen.items()
        }
        return Video(np.stack([scaled[index] for index in clip.indices]), clip)

    def _images(self, wanted: set[int]) -> Iterator[tuple[int, Any]]:
        """Yield number and PIL image of the frames ``wanted``."""
        if self.is_list:
            yield from ((index, open_image(self.files[index])) for index in sorted(wanted))
            return
        for index, (frame, _) in enumerate(_decoded(self.files[0])):
            if index in wanted:
                yield index, frame.to_image()
            if index >= max(wanted):
                return


def _decoded(file: bytes) -> Iterator[tuple[Any, float]]:
    """Yield the frames of a video file, and their number per second."""
    try:
        import av
    except ImportError as error:
        raise DataError("prompts have videos, which PyAV decodes: pip install 'rltrain[videos]'.") from error
    with (
        reading(av.FFmpegError),
        av.open(BytesIO(file), options={"format_whitelist": _FORMATS}, metadata_errors="replace") as container,
    ):
        if not container.streams.video:
            raise DataError("it has no video stream.")
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        if not rate:
            raise DataError("it does not give its frames per second.")
        for frame in container.decode(stream):
            yield frame, rate


def count_media(sizes: Sequence[Any]) -> tuple[int, int]:
    """Return the number of images and of videos among sizes of media."""
    num_videos = sum(isinstance(size, VideoSize | Clip) for size in sizes)
    return len(sizes) - num_videos, num_videos
