"""Bar charts as SVG, for light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

__all__ = ["Bar", "chart"]

_WIDTH = 760
_NAMES = 200
"""Pixels for the names, left of the bars."""

_VALUES = 150
"""Pixels for the values, right of the longest bar."""

_HEAD = 56
_ROW = 26
_BAR = 16
_FOOT = 10

_STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; }
  .title { font-size: 15px; font-weight: 600; }
  .quiet { fill: #59636e; }
  .own { font-weight: 600; }
  .bar { fill: #8c959f; }
  .bar.own { fill: #0969da; }
  .spread { stroke: #1f2328; stroke-width: 1.5; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; }
    .quiet { fill: #9198a1; }
    .bar { fill: #656c76; }
    .bar.own { fill: #4493f8; }
    .spread { stroke: #f0f6fc; }
  }
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """One row. value, low, high: None if there is no figure; `text` gives the reason. own: whether it is Perdure."""

    name: str
    value: float | None
    low: float | None
    high: float | None
    text: str
    own: bool


def chart(title: str, subtitle: str, bars: Sequence[Bar]) -> str:
    """Return a chart of horizontal bars on one linear scale; a thin line spans the lowest and highest round."""
    height = _HEAD + _ROW * len(bars) + _FOOT
    longest = max((bar.high or 0.0 for bar in bars), default=0.0) or 1.0
    scale = (_WIDTH - _NAMES - _VALUES) / longest
    size = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    rows = [_row(bar, _HEAD + _ROW * number, scale) for number, bar in enumerate(bars)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label={quoteattr(title)}>',
            f"<style>{_STYLE}</style>",
            f'<text class="title" x="8" y="20">{escape(title)}</text>',
            f'<text class="quiet" x="8" y="40">{escape(subtitle)}</text>',
            *rows,
            "</svg>",
            "",
        ]
    )


def _row(bar: Bar, top: int, scale: float) -> str:
    own = " own" if bar.own else ""
    middle = top + _ROW / 2
    parts = [f'<text class="{own.strip() or "name"}" x="8" y="{middle + 4:g}">{escape(bar.name)}</text>']
    if bar.value is None:
        parts.append(f'<text class="quiet" x="{_NAMES}" y="{middle + 4:g}">{escape(bar.text)}</text>')
        return "".join(parts)
    width = max(1.0, bar.value * scale)
    parts.append(
        f'<rect class="bar{own}" x="{_NAMES}" y="{middle - _BAR / 2:g}" width="{width:.1f}" height="{_BAR}" rx="2"/>'
    )
    end = width
    if bar.low is not None and bar.high is not None and bar.low < bar.high:
        left, right = _NAMES + bar.low * scale, _NAMES + bar.high * scale
        parts.append(f'<line class="spread" x1="{left:.1f}" x2="{right:.1f}" y1="{middle:g}" y2="{middle:g}"/>')
        end = max(width, bar.high * scale)
    parts.append(f'<text x="{_NAMES + end + 8:.1f}" y="{middle + 4:g}">{escape(bar.text)}</text>')
    return "".join(parts)
