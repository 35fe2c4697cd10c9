"""How many tokens of pictures must a pod encode for a request?"""

from __future__ import annotations

from collections.abc import Iterable

from router.types import PodId, ScenePicture


def tokens_to_encode(pictures: Iterable[ScenePicture], pod: PodId, cached_tokens: int) -> int:
    """Tokens of the pictures that the pod has not seen and whose KV is not among the first `cached_tokens`."""
    return sum(
        picture.token_count
        for picture in pictures
        if pod not in picture.pods and (picture.end_token is None or picture.end_token > cached_tokens)
    )
