// Drawings of points: says what is pointed at, shows one group alone, and filters rows of tables.
(function () {
  "use strict";
  for (const drawing of document.querySelectorAll(".points")) {
    const tip = drawing.querySelector(".tip");
    const say = (event) => {
      const mark = event.target.closest("i[data-tip]");
      if (mark) tip.textContent = mark.dataset.tip;
    };
    drawing.addEventListener("mouseover", say);
    drawing.addEventListener("click", say);
    const box = drawing.querySelector("select[data-points]");
    if (box) box.addEventListener("change", () => {
      let shown = 0;
      for (const mark of drawing.querySelectorAll("i[data-g]")) {
        mark.hidden = box.value !== "" && mark.dataset.g !== box.value;
        shown += mark.hidden ? 0 : 1;
      }
      tip.textContent = shown + " points";
    });
  }
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
})();
