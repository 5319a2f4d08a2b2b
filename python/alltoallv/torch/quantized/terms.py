"""What the ranks of a quantized reduction must agree on beside operator, dtype and counts, in the words of the core."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from alltoallv.quantization.spec import QuantizedReduction

_FEEDBACK = (
    "no error feedback",
    "error feedback",
    "error feedback of the gather only",
    "error feedback of both quantizations",
)

Term = tuple[str, str, str]


def terms_of(request: QuantizedReduction, feeds_back: bool, gather_feeds_back: bool) -> tuple[Term, ...]:
    """For `Proposal.terms`."""
    how = request.quantization
    mode = "dynamic scales" if request.scale is None else "a shared scale"
    if request.scale_2 is not None:
        mode = "two shared scales"
    terms = [("", "", mode), ("an output of ", "one of ", request.out_dtype)]
    if request.scale is None:
        terms += [
            ("bits ", "bits ", str(how.bits)),
            ("group_size ", "group_size ", str(how.group_size)),
            ("gather ", "", how.gather),
        ]
    terms.append(("overflow ", "", how.overflow))
    if request.scale is None:
        terms.append(("", "", _FEEDBACK[feeds_back + 2 * gather_feeds_back]))
    else:
        terms.append(_scale("scale", request.scale))
        if request.scale_2 is not None:
            terms.append(_scale("scale_2", request.scale_2))
        terms.append(("offset ", "offset ", f"{request.offset:.9g}"))
    return tuple(terms)


def _scale(name: str, values: npt.NDArray[np.float32]) -> Term:
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    if flat.size == 1:
        return f"{name} ", f"{name} ", f"{flat[0]:.9g}"
    digest = hashlib.blake2b(flat.tobytes(), digest_size=8).hexdigest()
    return f"{name} ", f"{name} ", f"[{flat[0]:.9g}, ...] of {flat.size} values (digest {digest})"
