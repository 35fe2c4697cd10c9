"""What is in the cluster's index?

    warmroute index stats       how much there is, of which model, at which cost
    warmroute index holders     who publishes, how well, since when
    warmroute index lookup      which holder has how much of one prompt
    warmroute index verify      does the index say what the engines say

Only reads. Every command takes the routers' configuration.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Table

from router.config.load import load
from router.config.schema import ModelConfig, RouterConfig
from router.errors import ConfigError, RouterError
from router.feeds.ask import open_client
from router.prompt.fingerprint import Fingerprinter
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import TokenizerSource, load_tokenizer
from router.publisher.verify import Verdict, verify_holder
from router.stores.connection import Connection
from router.stores.direct import DirectStore
from router.stores.local import LocalStore
from router.stores.registry import Registry
from router.stores.schema import HolderRow, Keys, scope_of
from router.types import Endpoint, Generation, InferenceRequest, PromptPrefix, Tier
from router.wiring.cluster import redis_address

T = TypeVar("T")
