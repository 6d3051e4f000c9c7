"""A first look at the training rows, before a run is planned: how many, and how long in tokens.

Takes a second or two for files of any size. Loads no torch, unless a tokenizer must be fetched.
"""

import math
import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from sft_play.config.schema import Config, SourceSection
from sft_play.data.files import Chunk, read_chunks
from sft_play.data.row_detection import detect_format
from sft_play.data.row_formats import RowFormat
from sft_play.data.row_parsing import parse_rows
