"""Data: sources of records in the formats that people have, and the feed that gives them out in an order that can be resumed."""

from .feed import Feed as Feed
from .feed import Position as Position
from .source import Arrays as Arrays
from .source import BadRecord as BadRecord
from .source import Each as Each
from .source import Source as Source
