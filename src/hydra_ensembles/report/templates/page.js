"use strict";
// Everything is readable without this script; it only lets a reader hide models, choose an
// out-of-distribution set and try thresholds.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const find = (id) => document.getElementById(id);
  const percent = (value) => {  // as rounding.py: only a full share is 100 %
    const tenths = Math.round(1000 * value);
    return ((value > 0 && value < 1 ? Math.min(Math.max(tenths, 1), 999) : tenths) / 10).toFixed(1) + "\u00a0%";
  };

  for (const box of document.querySelectorAll("input[data-toggle]")) {
    box.addEventListener("change", () => {
      for (const mark of document.querySelectorAll(`[data-series="${box.dataset.toggle}"]`)) {
        mark.classList.toggle("hidden", !box.checked);
      }
    });
  }

  const chooser = find("ood-set");
  if (chooser) {
    const show = () => {
      for (const panel of document.querySelectorAll(".ood-panel")) {
        panel.classList.toggle("hidden", chooser.value !== "*" && panel.dataset.set !== chooser.value);
      }
    };
    chooser.addEventListener("change", show);
    show();
  }

  const slider = find("coverage");
  if (!slider) return;
  const model = find("coverage-model");
  const chart = find("risk-chart");
  const cursor = find("cursor");
  const update = () => {
    const table = data.thresholds[model.value];
    const step = Number(slider.value) - 1;
    const coverage = table.coverage[step];
    find("out-threshold").textContent = table.threshold[step].toPrecision(3);
    find("out-coverage").textContent = percent(coverage);
    find("out-risk").textContent = percent(table.risk[step]);
    for (const cell of document.querySelectorAll("[data-ood]")) {
      cell.textContent = percent(table["ood/" + cell.dataset.ood][step]);
    }
    slider.setAttribute("aria-valuetext", `answer ${percent(coverage)} of the examples`);
    // drawn at full coverage, moved to the left from there
    cursor.setAttribute("transform", `translate(${(coverage - 1) * Number(chart.dataset.width)} 0)`);
  };
  slider.addEventListener("input", update);
  model.addEventListener("change", update);
  update();
})();
