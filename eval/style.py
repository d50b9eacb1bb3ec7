"""The HTML report's stylesheet. Light by default, dark where the reader's system is; one column on a phone."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #f5f6f8; --card: #ffffff; --ink: #1d2430; --soft: #5d6675; --line: #dfe3e9; --accent: #1f5fd0;
  --warn: #8a5a00; --warn-page: #fff6e0; --warn-line: #eed9a6;
  --series-0: #1f5fd0; --series-1: #8b93a1; --series-2: #d9730d; --series-3: #2b8a5f; --series-4: #9b4fc0;
  --series-5: #c2335a; --series-6: #0f8a9d;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #11151c; --card: #1a202a; --ink: #e6e9ef; --soft: #9aa4b4; --line: #333c4a; --accent: #7fb0ff;
    --warn: #f0c76b; --warn-page: #2a2414; --warn-line: #57481f;
    --series-0: #7fb0ff; --series-1: #8b93a1; --series-2: #ffa657; --series-3: #6fd3a2; --series-4: #d3a1ef;
  --series-5: #f0839f; --series-6: #5fd0e0;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.5;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", "DejaVu Sans", sans-serif;
  font-size: 16px; }
main { max-width: 1120px; margin: 0 auto; padding: 20px 16px 48px; }
header, section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 20px 24px; margin: 0 0 16px; }
h1 { font-size: 1.65rem; line-height: 1.25; margin: 0 0 16px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 0 0 10px; }
h3 { font-size: 1rem; margin: 18px 0 6px; }
p { margin: 0 0 8px; overflow-wrap: anywhere; }
.kicker { color: var(--soft); margin-bottom: 6px; }
.kicker b { color: var(--ink); font-weight: 600; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px; margin: 0 0 16px; }
.tile { border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; }
.tile .name { color: var(--soft); font-size: 0.85rem; }
.tile .value { font-size: 1.7rem; font-weight: 650; line-height: 1.3; color: var(--accent); white-space: nowrap; }
.tile .note, .note { color: var(--soft); font-size: 0.85rem; min-height: 1.2em; }
.caveats { background: var(--warn-page); border-color: var(--warn-line); }
.caveats h2 { color: var(--warn); }
.caveats ul { margin: 0; padding-left: 20px; }
.caveats li { margin: 0 0 4px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.92rem; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 10px; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th { font-weight: 500; }
thead th { color: var(--soft); font-size: 0.85rem; vertical-align: bottom; }
th:first-child { text-align: left; padding-left: 0; min-width: 7.5rem; position: sticky; left: 0;
  background: var(--card); }
.facts th:first-child { min-width: 0; }
td:last-child, thead th:last-child { padding-right: 2px; }
tbody tr:last-child th, tbody tr:last-child td { border-bottom: 0; }
.facts td { text-align: left; overflow-wrap: anywhere; }
.facts th { white-space: nowrap; color: var(--soft); }
.facts thead { display: none; }
.prompts td:nth-child(2), .prompts th:nth-child(2) { text-align: left; }
.ci, .mean { color: var(--soft); font-size: 0.85em; }
.ci, .nowrap, .mean { white-space: nowrap; }
thead .ci { white-space: normal; overflow-wrap: anywhere; min-width: 5.5rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 20px 28px; }
figure { margin: 0; min-width: 0; }
figure h3 { margin: 0 0 4px; }
figure svg { display: block; width: 100%; height: auto; max-width: 560px; }
.key { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 0.88rem; margin: 0 0 4px; }
.key i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
figcaption { color: var(--soft); font-size: 0.85rem; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr)); gap: 4px 32px; }
pre { background: var(--page); border: 1px solid var(--line); border-radius: 8px; padding: 12px; margin: 0 0 8px;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: 0.88rem; }
details { border-bottom: 1px solid var(--line); padding: 6px 0; }
details:last-child { border-bottom: 0; }
summary { cursor: pointer; }
dl { margin: 0; display: grid; grid-template-columns: minmax(150px, 230px) 1fr; gap: 8px 20px; }
dt { font-weight: 600; }
dd { margin: 0; color: var(--soft); }
@media (max-width: 640px) {
  main { padding: 10px 8px 32px; }
  header, section { padding: 14px 14px; border-radius: 8px; }
  h1 { font-size: 1.3rem; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 8px; }
  .tile { padding: 8px 10px; }
  .tile .value { font-size: 1.3rem; }
  dl { grid-template-columns: 1fr; gap: 2px; }
  dd { margin: 0 0 8px; }
  th, td { padding: 5px 7px; }
  .ci { display: block; }
}
@media print { body { background: none; } header, section { break-inside: avoid; } }
"""
