"""Tables of the papers, run again: `embrace bench reproduce`."""

from collections.abc import Mapping
from types import MappingProxyType

from bench.reproduce.domo import DOMO
from bench.reproduce.fedavg_table2 import EFFECTS, TABLE2
from bench.reproduce.fedlama_femnist import FEDLAMA
from bench.reproduce.table import Table

TABLES: Mapping[str, Table] = MappingProxyType({table.name: table for table in (TABLE2, EFFECTS, DOMO, FEDLAMA)})
