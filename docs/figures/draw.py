"""Draws the diagrams of the methods: ``python docs/figures/draw.py`` writes the SVG files beside it."""

from pathlib import Path

STYLE = """  <style>
    text { font: 15px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #1b1f24; }
    .small { font-size: 13px; fill: #57606a; }
    .line { fill: none; stroke: #1b1f24; stroke-width: 1.6; marker-end: url(#tip); }
    .plain { fill: none; stroke: #1b1f24; stroke-width: 1.6; }
    .stream { fill: none; stroke: #8a929c; stroke-width: 4; }
    .frozen { fill: #eceef1; stroke: #8a929c; stroke-width: 1.4; }
    .trained { fill: #d6e8f4; stroke: #0072b2; stroke-width: 1.8; }
    .sum { fill: #ffffff; stroke: #1b1f24; stroke-width: 1.6; }
    .tip { fill: #1b1f24; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e8eaed; } .small { fill: #a2abb6; }
      .line, .plain { stroke: #e8eaed; } .tip { fill: #e8eaed; } .sum { fill: #14171b; stroke: #e8eaed; }
      .frozen { fill: #262b32; stroke: #7d8794; } .trained { fill: #16374c; stroke: #3d9fd8; }
    }
  </style>
  <defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path class="tip" d="M0,0 L8,4 L0,8 z"/></marker></defs>"""  # noqa: E501


class Diagram:
    """Boxes, lines and text on a canvas of so many pixels; what was trained is blue, what is frozen grey."""

    def __init__(self, name, title, description, width, height):
        self.name = name
        size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title desc">',
            f'  <title id="title">{title}</title>',
            f'  <desc id="desc">{description}</desc>',
            STYLE,
        ]

    def svg(self):
        """Return the file's text."""
        return "\n".join([*self.lines, "</svg>"]) + "\n"

    def line(self, points, kind="line"):
        """Draw an arrow through points."""
        self.lines.append(f'  <polyline class="{kind}" points="{points}"/>')

    def plain(self, points):
        """Draw a line without an arrow head."""
        self.line(points, "plain")

    def stream(self, points):
        """Draw the residual stream."""
        self.line(points, "stream")

    def text(self, text, x, y, anchor="middle", kind=""):
        """Write text."""
        self.lines.append(f'  <text{kind} x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>')

    def small(self, text, x, y, anchor="middle"):
        """Write a remark."""
        self.text(text, x, y, anchor, ' class="small"')

    def frozen(self, text, x, y, width, height=36, kind="frozen"):
        """Draw a box of what is pretrained."""
        self.lines.append(f'  <rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>')
        self.text(text, x + width // 2, y + height // 2 + 5)

    def trained(self, text, x, y, width):
        """Draw a box of what is trained."""
        self.frozen(text, x, y, width, kind="trained")

    def plus(self, x, y, sign="+"):
        """Draw a sum, or a product."""
        self.lines.append(f'  <circle class="sum" cx="{x}" cy="{y}" r="13"/>')
        self.text(sign, x, y + 5)

    def legend(self, x, y):
        """Say what the colours mean."""
        for kind, text, at in (("trained", "trained", x), ("frozen", "frozen, pretrained", x + 100)):
            self.lines.append(f'  <rect class="{kind}" x="{at}" y="{y}" width="22" height="15" rx="4"/>')
            self.small(text, at + 30, y + 12, "start")


def pre_projection():
    """Draw the pre-projection with the content skip."""
    description = (
        "The normed hidden state x passes a small residual MLP that gives x tilde. W_Q, W_K and W_V read x tilde; "
        "position enters after them. The content skip adds x tilde times W_skip to the residual stream beside the "
        "attention's output. Only the MLP and W_skip are trained."
    )
    d = Diagram("pre-projection", "Pre-projection and content skip", description, 925, 370)
    d.stream("20,330 905,330")
    d.small("residual stream", 20, 355, "start")
    d.line("50,330 50,186")
    d.frozen("norm", 25, 150, 50)
    d.plain("75,168 118,168")
    d.text("x", 97, 158)
    d.line("118,168 277,168")
    d.line("118,168 118,80 132,80")
    d.trained("W↑", 132, 62, 46)
    d.line("178,80 188,80")
    d.trained("σ", 188, 62, 30)
    d.line("218,80 228,80")
    d.trained("W↓", 228, 62, 46)
    d.line("274,80 290,80 290,155")
    d.plus(290, 168)
    d.plain("303,168 382,168")
    d.text("x~", 345, 158)
    d.line("382,168 382,80 412,80")
    d.line("382,168 412,168")
    d.line("382,168 382,222 412,222")
    d.frozen("W_Q", 412, 62, 56)
    d.frozen("W_K", 412, 150, 56)
    d.frozen("W_V", 412, 204, 56)
    d.line("468,80 492,80")
    d.line("468,168 492,168")
    d.frozen("RoPE", 492, 62, 66)
    d.frozen("RoPE", 492, 150, 66)
    d.line("558,80 600,80 600,128")
    d.line("558,168 588,168")
    d.line("468,222 600,222 600,206")
    d.frozen("attention", 588, 130, 96, 76)
    d.line("684,168 708,168")
    d.frozen("W_O", 708, 150, 56)
    d.line("764,168 840,168 840,317")
    d.line("360,168 360,276 412,276")
    d.trained("W_skip", 412, 258, 76)
    d.line("488,276 790,276 790,317")
    d.small("content skip: no position, no attention", 640, 266)
    d.small("pre-projection, before position enters", 203, 44)
    d.plus(790, 330)
    d.plus(840, 330)
    d.legend(640, 16)
    return d


def nonlinear_query():
    """Draw the nonlinear query with a weight anchor."""
    description = (
        "The query is half the sum of an anchor, the frozen projection of x (twice in the preserving form), and of a "
        "trained bottleneck MLP of x between two norms. Keys and values stay as they were."
    )
    d = Diagram("nonlinear-query", "Anchored nonlinear query", description, 885, 335)
    d.text("x", 30, 173)
    d.plain("42,168 92,168")
    d.line("92,168 92,80 112,80")
    d.trained("RMSNorm", 112, 62, 92)
    d.line("204,80 220,80")
    d.trained("W₁", 220, 62, 60)
    d.line("280,80 296,80")
    d.trained("GELU", 296, 62, 66)
    d.line("362,80 378,80")
    d.trained("W₂", 378, 62, 60)
    d.line("438,80 454,80")
    d.trained("LN", 454, 62, 50)
    d.line("504,80 560,80 560,155")
    d.text("f(x)", 532, 70)
    d.small("d → r", 250, 52)
    d.small("r → d_q", 408, 52)
    d.line("92,168 220,168")
    d.frozen("W_Q", 220, 150, 60)
    d.line("280,168 378,168")
    d.frozen("× 2", 378, 150, 60)
    d.line("438,168 547,168")
    d.text("A(x)", 330, 158)
    d.small("preserving form only", 408, 204)
    d.plus(560, 168)
    d.line("573,168 606,168")
    d.frozen("÷ 2", 606, 150, 50)
    d.line("656,168 712,168")
    d.text("Q", 684, 158)
    d.frozen("heads, RoPE, …", 712, 150, 150)
    d.line("92,168 92,246 220,246")
    d.frozen("W_K", 220, 228, 60)
    d.line("280,246 712,246")
    d.text("K", 684, 236)
    d.frozen("heads, RoPE, …", 712, 228, 150)
    d.line("92,246 92,300 220,300")
    d.frozen("W_V", 220, 282, 60)
    d.line("280,300 712,300")
    d.text("V", 684, 290)
    d.frozen("heads", 712, 282, 150)
    d.legend(112, 12)
    return d


def content_skip():
    """Draw the skip alone."""
    description = (
        "The normed hidden state x goes through the frozen attention as before. Beside it, x times the trained matrix "
        "W_skip is added to the residual stream."
    )
    d = Diagram("content-skip", "The content skip alone", description, 620, 250)
    d.legend(330, 12)
    d.stream("20,210 600,210")
    d.small("residual stream", 20, 235, "start")
    d.line("50,210 50,106")
    d.frozen("norm", 25, 70, 50)
    d.plain("75,88 130,88")
    d.text("x", 102, 78)
    d.line("130,88 190,88")
    d.frozen("attention: Q, K, V, position, W_O", 190, 70, 260)
    d.line("450,88 540,88 540,197")
    d.line("130,88 130,156 190,156")
    d.trained("W_skip", 190, 138, 90)
    d.line("280,156 490,156 490,197")
    d.small("no position, no attention", 385, 146)
    d.plus(490, 210)
    d.plus(540, 210)
    return d


def query_temperature():
    """Draw the query temperature."""
    description = (
        "The frozen projection W_Q gives the query of each head, which is multiplied by one plus a trained number of "
        "that head before position enters. Keys and values stay as they were."
    )
    d = Diagram("query-temperature", "Query temperature", description, 640, 210)
    d.legend(340, 12)
    d.text("x", 30, 93)
    d.plain("42,88 80,88")
    d.line("80,88 120,88")
    d.frozen("W_Q", 120, 70, 60)
    d.line("180,88 327,88")
    d.text("q_h", 250, 78)
    d.plus(340, 88, "×")
    d.trained("1 + τ_h", 295, 128, 90)
    d.line("340,128 340,101")
    d.line("353,88 450,88")
    d.frozen("heads, RoPE, …", 450, 70, 150)
    d.line("80,88 80,178 120,178")
    d.frozen("W_K, W_V", 120, 160, 90)
    d.line("210,178 600,178")
    d.small("unchanged", 520, 168)
    return d


def lora():
    """Draw LoRA on one projection."""
    description = (
        "The frozen projection W of x, and beside it the product of two trained matrices A and B of rank r, scaled by "
        "alpha over r and added to the result."
    )
    d = Diagram("lora", "LoRA on a projection", description, 560, 190)
    d.legend(260, 12)
    d.text("x", 30, 83)
    d.plain("42,78 90,78")
    d.line("90,78 180,78")
    d.frozen("W", 180, 60, 150)
    d.line("330,78 437,78")
    d.line("90,78 90,148 130,148")
    d.trained("A", 130, 130, 50)
    d.line("180,148 220,148")
    d.trained("B", 220, 130, 50)
    d.line("270,148 310,148")
    d.frozen("× α/r", 310, 130, 70)
    d.line("380,148 450,148 450,91")
    d.small("d → r → d_out", 200, 183)
    d.plus(450, 78)
    d.line("463,78 530,78")
    return d


FIGURES = (pre_projection, nonlinear_query, content_skip, query_temperature, lora)


def main():
    """Write every figure."""
    for draw in FIGURES:
        diagram = draw()
        Path(__file__).with_name(f"{diagram.name}.svg").write_text(diagram.svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
