"""Data: loaders, corruptions, attacks, OOD proxies and the embedded demo set."""

from __future__ import annotations

from .attacks import adversarial
from .batches import Batch, batch_length
from .class_names import check_class_order
from .corruptions import COMMON, corrupt, corrupt_texts, corrupted, corruptions, text_corruptions
from .digits_data import Demo, digits
from .image_data import image_folder
from .loaders import Batches, Data, as_data, check_reiterable, count
from .proxies import make_proxies, proxies
from .sources import load_data
from .splits import fingerprint, sample, split
from .text_files import text_data, text_file
from .transforms import ImageTransform, image_transform

__all__ = [
    "COMMON",
    "Batch",
    "Batches",
    "Data",
    "Demo",
    "ImageTransform",
    "adversarial",
    "as_data",
    "batch_length",
    "check_class_order",
    "check_reiterable",
    "corrupt",
    "corrupt_texts",
    "corrupted",
    "corruptions",
    "count",
    "digits",
    "fingerprint",
    "image_folder",
    "image_transform",
    "load_data",
    "make_proxies",
    "proxies",
    "sample",
    "split",
    "text_corruptions",
    "text_data",
    "text_file",
]
