// Collects errors, draws the page's charts with Plotly in the colours of the page as it is seen
// (light, dark or printed), and filters rows of tables.
(function () {
  "use strict";
  const root = document.documentElement;
  const printed = 660;
  let figures = {};

  // Errors are kept where a person, or a test, can read them: <html data-errors>.
  const keep = (error) => {
    root.dataset.errors = (root.dataset.errors ? root.dataset.errors + "\n" : "") + error;
  };
  window.addEventListener("error", (event) => keep(event.message || "a part failed to load"), true);
  window.addEventListener("unhandledrejection", (event) => keep(String(event.reason)));
  document.addEventListener("securitypolicyviolation", (event) =>
    keep("refused: " + event.violatedDirective + " " + event.blockedURI));

  // A colour in a chart is the name of a CSS variable.
  function coloured(value, key, style) {
    if (Array.isArray(value)) return value.map((item) => coloured(item, key, style));
    if (value && typeof value === "object") {
      const copy = {};
      for (const name of Object.keys(value)) copy[name] = coloured(value[name], name, style);
      return copy;
    }
    const named = typeof value === "string" && /color(scale)?$/.test(key) && /^--[a-z0-9]+$/.test(value);
    return named ? style.getPropertyValue(value).trim() : value;
  }

  function layout(figure, style, width) {
    const own = coloured(figure.layout, "", style);
    const narrow = (width || root.clientWidth) < 600;
    const [ink, line, surface] = ["--ink", "--line", "--surface"].map((name) => style.getPropertyValue(name).trim());
    const family = style.getPropertyValue("font-family");
    for (const name of Object.keys(own).filter((name) => /^[xy]axis/.test(name)))
      own[name] = Object.assign({ gridcolor: line, zerolinecolor: line, linecolor: line,
                                  automargin: true, ticks: "" }, own[name]);
    return Object.assign({ margin: { l: narrow ? 44 : 60, r: 12, t: narrow ? 72 : 48, b: 48 } }, own, {
      height: figure.height, width: width, autosize: !width,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink, size: narrow ? 11 : 12.5, family: family },
      hoverlabel: { bgcolor: surface, bordercolor: ink, font: { color: ink, family: family }, align: "left" },
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

  // Which objective stands on which axis of the Pareto front.
  function offerAxes() {
    for (const box of document.querySelectorAll("select[data-figure]")) {
      box.addEventListener("change", () => {
        const figure = figures[box.dataset.figure];
        const chosen = figure.axes[box.value];
        const side = box.dataset.axis;
        figure.data[0][side] = chosen.values;
        figure.data[1][side] = [chosen.best];
        Object.assign(figure.layout[side + "axis"], { title: { text: chosen.title, standoff: 10 }, type: chosen.type });
        draw();
      });
    }
  }

  function filterRows() {
    for (const box of document.querySelectorAll("input[data-rows]")) {
      const rows = document.querySelectorAll("#" + box.dataset.rows + " tbody tr");
      const left = document.querySelector("[data-left='" + box.dataset.rows + "']");
      box.addEventListener("input", () => {
        const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
        let shown = 0;
        for (const row of rows) {
          const text = row.textContent.toLowerCase();
          row.hidden = !words.every((word) => text.includes(word));
          shown += row.hidden ? 0 : 1;
        }
        left.textContent = words.length ? shown + " of " + rows.length + " rows" : "";
      });
    }
  }

  function unfoldForPrint() {
    let folded = [];
    window.addEventListener("beforeprint", () => {
      folded = Array.from(document.querySelectorAll("details:not([open])"));
      for (const details of folded) details.open = true;
      root.classList.add("printing");
      if (window.Plotly) draw(printed);
    });
    window.addEventListener("afterprint", () => {
      for (const details of folded) details.open = false;
      root.classList.remove("printing");
      if (window.Plotly) draw();
    });
  }

  // Plotly is compressed to keep the page small; the page's policy admits its text by its hash.
  async function unpack(packed) {
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  document.addEventListener("DOMContentLoaded", () => {
    filterRows();
    unfoldForPrint();
    const packed = document.getElementById("plotly");
    if (!packed) return;
    figures = JSON.parse(document.getElementById("figures").textContent);
    const start = () => unpack(packed.textContent).then(() => {
      offerAxes();
      window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
      return draw();
    }).then((drawn) => { root.dataset.drawn = String(drawn.length); });
    // Text and tables are painted before Plotly is unpacked.
    requestAnimationFrame(() => setTimeout(start));
  });
})();
