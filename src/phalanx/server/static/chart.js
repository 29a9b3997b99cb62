// A line chart of the last minutes on a canvas.

const MIN_POINTS = 60, MAX_POINTS = 300; // the width is worth this many: it grows with what there is

/** The next of 1, 2, 5 times a power of ten. */
function roundUp(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * unit).find((bound) => bound >= value * 0.999);
}

export class Chart {
  /**
   * names: CSS variables of the lines' colours. format: of the scale's numbers. top: the scale's fixed end.
   */
  constructor(canvas, { names = ["--first"], format = String, top = null } = {}) {
    this.canvas = canvas;
    this.names = names;
    this.format = format;
    this.top = top;
    this.points = []; // one array a moment, one value or null a line
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  push(values) {
    this.points.push(values);
    if (this.points.length > MAX_POINTS) this.points.shift();
    this.draw();
  }

  draw() {
    const { canvas, points } = this;
    const scale = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width || !height) return;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const context = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    context.scale(scale, scale);
    const largest = Math.max(0, ...points.flat().filter((value) => value !== null));
    const top = this.top ?? (largest > 0 ? roundUp(largest) : 1);
    const y = (value) => height - 4 - (Math.min(value, top) / top) * (height - 22);
    context.strokeStyle = style.getPropertyValue("--edge");
    context.fillStyle = style.getPropertyValue("--faint");
    context.font = "11px system-ui, sans-serif";
    context.beginPath();
    for (const value of [0, top / 2, top]) {
      context.moveTo(0, y(value));
      context.lineTo(width, y(value));
    }
    context.stroke();
    context.fillText(this.format(top), 2, y(top) - 4);
    const span = Math.max(points.length, MIN_POINTS) - 1;
    this.names.forEach((name, line) => {
      context.strokeStyle = style.getPropertyValue(name);
      context.lineWidth = 1.5;
      context.beginPath();
      let isDown = false;
      points.forEach((values, i) => {
        const value = values[line];
        if (value === null) {
          isDown = false;
          return;
        }
        const x = width - ((points.length - 1 - i) / span) * width;
        if (isDown) context.lineTo(x, y(value));
        else context.moveTo(x, y(value));
        isDown = true;
      });
      context.stroke();
    });
  }
}
