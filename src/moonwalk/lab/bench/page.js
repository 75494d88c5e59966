const plots = JSON.parse(document.getElementById("plots").textContent);
const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
const themed = (layout) => {
  const css = getComputedStyle(root), of = (name) => css.getPropertyValue(name).trim();
  const axis = {gridcolor: of("--grid"), zerolinecolor: of("--line"), linecolor: of("--soft"), tickcolor: of("--soft")};
  return {...layout,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: {family: getComputedStyle(document.body).fontFamily, size: 12, color: of("--ink")},
    margin: {l: 56, r: 26, t: 46, b: 58},
    modebar: {bgcolor: "rgba(0,0,0,0)", color: of("--line"), activecolor: of("--soft"), remove: ["select", "lasso"]},
    hoverlabel: {align: "left", font: {size: 12}},
    legend: {orientation: "h", yref: "container", y: 0.01, yanchor: "bottom", x: 0, font: {size: 11}, bgcolor: "rgba(0,0,0,0)"},
    xaxis: {...layout.xaxis, ...axis}, yaxis: {...layout.yaxis, ...axis},
    shapes: layout.shapes.map((s) => ({...s, line: {...s.line, color: of("--soft")}})),
    annotations: layout.annotations.map((a) => ({...a, font: {...a.font, color: of("--soft")}}))};
};
const draw = () => plots.forEach((p) =>
  Plotly.react(p.id, p.data, themed(p.layout), {responsive: true, displaylogo: false}));
const choose = (name) => { root.dataset.theme = name; draw(); };
document.getElementById("theme").addEventListener("click",
  () => choose(root.dataset.theme === "dark" ? "light" : "dark"));
dark.addEventListener("change", () => choose(dark.matches ? "dark" : "light"));
choose(dark.matches ? "dark" : "light");
