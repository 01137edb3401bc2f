// Each figure has an SVG image and its numbers: for each series, [x and y in pixels, ...values] of each point.
const shown = value => value.toLocaleString("en", Number.isInteger(value) ? {} : {maximumSignificantDigits: 4});
const quoted = value => /[",\n\r]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value;
const save = (blob, download) => {
  const href = URL.createObjectURL(blob);
  Object.assign(document.createElement("a"), {href, download}).click();
  setTimeout(() => URL.revokeObjectURL(href), 10000);
};

for (const figure of document.querySelectorAll("figure")) {
  const [plot, svg, caption, read] = [".plot", "svg", "figcaption", ".read"].map(name => figure.querySelector(name));
  const {columns, together, series} = JSON.parse(figure.querySelector("script").textContent);
  const points = series.flatMap(([name, marks]) => marks.map(([x, y, ...values]) => ({x, y, name, values})));
  const order = points.toSorted((a, b) => a.x - b.x || a.y - b.y);
  const title = [...svg.querySelectorAll(".title, .panel")].map(text => text.textContent).join(" ");
  const file = (title.match(/[\p{L}\p{N}]+/gu) ?? ["figure"]).join("-");
  const {width, height} = svg.viewBox.baseVal;
  const cursor = svg.appendChild(document.createElementNS(svg.namespaceURI, "g"));
  cursor.classList.add("cursor");

  // The values at the pointer, or those selected with the arrow keys
  let here = null;
  const show = point => {
    here = point;
    const same = points.filter(each => each === point || together && each.values[0] === point?.values[0]);
    cursor.replaceChildren(...same.map(({x, y}) => {
      const circle = document.createElementNS(svg.namespaceURI, "circle");
      for (const [name, value] of Object.entries({cx: x, cy: y, r: 5})) circle.setAttribute(name, value);
      return circle;
    }));
    const named = ({name, values}, from) => [name && (from ? name : `${columns[0]} ${name}`),
      ...values.slice(from).map((value, place) => `${from && !place ? "" : columns[from + place + 1]} ${shown(value)}`)];
    read.textContent = !point ? "" : together
      ? [`${columns[1]} ${shown(point.values[0])}`, ...same.map(each => named(each, 1).join(" "))].join("; ")
      : named(point, 0).filter(Boolean).join("; ");
  };
  plot.onpointermove = plot.onpointerdown = ({clientX, clientY}) => {
    const box = svg.getBoundingClientRect(), scale = width / box.width;
    const [x, y] = [(clientX - box.x) * scale, (clientY - box.y) * scale];
    const far = point => Math.hypot(point.x - x, (together ? 0.2 : 1) * (point.y - y));
    show(points.reduce((best, point) => far(point) < far(best) ? point : best, points[0]));
  };
  plot.onpointerleave = ({pointerType}) => pointerType === "mouse" && show(null);
  plot.onblur = () => show(null);
  plot.onkeydown = event => {
    const step = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1}[event.key];
    if (!step) return;
    event.preventDefault();
    const along = /Right|Left/.test(event.key), from = here ? order.indexOf(here) : -1;
    const next = step > 0 ? order.slice(from + 1) : order.slice(0, Math.max(0, from)).reverse();
    show(next.find(each => !here || (each.x !== here.x) === along) ?? here);
  };
  plot.ariaLabel = `${title}; use the arrow keys to read the values`;

  // Downloads, always in light colors
  const image = () => {
    const copy = svg.cloneNode(true), style = copy.querySelector("style");
    copy.querySelector(".cursor").remove();
    style.textContent = style.textContent.split("@media")[0];
    return new XMLSerializer().serializeToString(copy);
  };
  const downloads = {
    svg: () => new Blob([image()], {type: "image/svg+xml"}),
    png: async () => {
      const scale = Math.min(3, 16000 / Math.max(width, height));  // larger canvases cannot be saved
      const picture = new Image(), canvas = new OffscreenCanvas(scale * width, scale * height);
      picture.src = `data:image/svg+xml,${encodeURIComponent(image())}`;
      await picture.decode();
      canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
      return canvas.convertToBlob();
    },
    csv: () => new Blob([columns, ...points.map(({name, values}) => [name, ...values])]
      .map(row => `${row.map(quoted)}\n`), {type: "text/csv"}),
  };
  for (const button of caption.querySelectorAll("button")) {
    const kind = button.textContent.toLowerCase();
    button.ariaLabel = `${button.textContent} of ${title}`;
    button.onclick = async () => save(await downloads[kind](), `${file}.${kind}`);
  }
}
document.body.dataset.ready = "yes";
