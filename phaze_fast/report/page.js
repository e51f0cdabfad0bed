// Draws the page's figures, in the colours of the page as it is seen: light, dark or printed.
(function () {
  "use strict";
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const printed = 660;

  // A colour in a figure is the name of a CSS variable.
  function coloured(value, key, style) {
    if (Array.isArray(value)) return value.map((each) => coloured(each, key, style));
    if (value && typeof value === "object") {
      const copy = {};
      for (const name of Object.keys(value)) copy[name] = coloured(value[name], name, style);
      return copy;
    }
    const named = typeof value === "string" && /color$/.test(key) && /^--[a-z0-9]+$/.test(value);
    return named ? style.getPropertyValue(value).trim() : value;
  }

  function axis(own, style) {
    const line = style.getPropertyValue("--line").trim();
    return Object.assign({ gridcolor: line, zerolinecolor: line, linecolor: line,
                           automargin: true, ticks: "" }, own);
  }

  function layout(figure, style, width) {
    const ink = style.getPropertyValue("--ink").trim();
    const surface = style.getPropertyValue("--surface").trim();
    const own = coloured(figure.layout, "", style);
    const narrow = (width || root.clientWidth) < 600;
    return Object.assign({}, own, {
      height: figure.height, width: width,
      autosize: !width,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink, size: narrow ? 11 : 12.5, family: style.getPropertyValue("font-family") },
      hoverlabel: { bgcolor: surface, bordercolor: ink, font: { color: ink, family: style.getPropertyValue("font-family") }, align: "left" },
      margin: { l: narrow ? 44 : 60, r: 12, t: narrow ? 72 : 48, b: 48 },
      xaxis: axis(own.xaxis, style), yaxis: axis(own.yaxis, style),
    });
  }

  function draw(width) {
    const style = getComputedStyle(root);
    const config = { displayModeBar: false, displaylogo: false, responsive: true };
    return Promise.all(Object.keys(figures).map((name) => {
      const place = document.getElementById("plot-" + name);
      const data = coloured(figures[name].data, "", style);
      return window.Plotly.react(place, data, layout(figures[name], style, width), config);
    }));
  }

  function start() {
    // Which objective stands on which axis of the front.
    for (const box of document.querySelectorAll("select[data-figure]")) {
      box.addEventListener("change", () => {
        const figure = figures[box.dataset.figure];
        const chosen = figure.axes[box.value];
        const side = box.dataset.axis;
        figure.data[0][side] = chosen.values;
        figure.data[1][side] = [chosen.best];
        Object.assign(figure.layout[side + "axis"], { title: { text: chosen.title }, type: chosen.type });
        draw();
      });
    }

    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
    let folded = [];
    window.addEventListener("beforeprint", () => {
      folded = Array.from(document.querySelectorAll("details:not([open])"));
      for (const each of folded) each.open = true;
      root.classList.add("printing");
      draw(printed);
    });
    window.addEventListener("afterprint", () => {
      for (const each of folded) each.open = false;
      root.classList.remove("printing");
      draw();
    });
    draw().then((all) => { root.dataset.drawn = String(all.length); });
  }

  // Plotly is packed to keep the page small; run from the text it is known to the page's policy by.
  async function unpack() {
    const packed = atob(document.getElementById("plotly").textContent);
    const bytes = Uint8Array.from(packed, (each) => each.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  unpack().then(start);
})();
