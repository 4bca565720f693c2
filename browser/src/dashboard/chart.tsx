/** Lines over rounds, with the numbers behind them as a table. */
import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

import { printable } from "../federation/printable.ts";

export interface Line {
  readonly name: string;
  readonly values: ReadonlyMap<number, number>;
  readonly dashed?: boolean;
}

interface ChartProps {
  readonly title: string;
  readonly x: string; // what is counted from left to right
  readonly lines: readonly Line[];
  readonly show: (value: number) => string;
  readonly bars?: boolean;
  readonly place?: (at: number) => string; // names the places from left to right; else they are numbers
}

const HEIGHT = 180;
const COLOURS = ["--series-1", "--series-2", "--series-3", "--series-4", "--series-5", "--series-6"];

/** Whether the person wants it dark, also when that changes. */
function useDark(): boolean {
  const asked = matchMedia("(prefers-color-scheme: dark)");
  const [dark, setDark] = useState(asked.matches);
  useEffect(() => {
    const change = (): void => setDark(asked.matches);
    asked.addEventListener("change", change);
    return () => asked.removeEventListener("change", change);
  }, []);
  return dark;
}

export const colour = (name: string): string => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function Chart({ title, x, lines, show, bars = false, place: named }: ChartProps) {
  const nameOf = named ?? String;
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot>(undefined);
  const [at, setAt] = useState<number>();
  const dark = useDark();
  const places = [...new Set(lines.flatMap((line) => [...line.values.keys()]))].sort((a, b) => a - b);
  const data = [places, ...lines.map((line) => places.map((where) => line.values.get(where) ?? null))] as unknown as uPlot.AlignedData;
  const names = lines.map((line) => line.name).join("|");
  useEffect(() => {
    if (place.current === null || names === "") return;
    const quiet = colour("--quiet");
    const axis = { stroke: quiet, font: "12px system-ui, sans-serif", grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    const stroke = (index: number): string => colour(COLOURS[index % COLOURS.length]!);
    const made = new uPlot(
      {
        width: place.current.clientWidth || 300,
        height: HEIGHT,
        legend: { show: false },
        cursor: { y: false, points: { size: 7 }, drag: { x: false, y: false } },
        padding: [12, 12, 0, 0],
        scales: { x: { time: false, range: (_, least, most) => (bars || least === most ? [least - 0.6, most + 0.6] : named ? [least - 0.2, most + 0.2] : [least, most]) }, y: { range: { min: { pad: 0.1, soft: 0, mode: 2 }, max: { pad: 0.1, soft: 0, mode: 2 } } } },
        axes: [
          { ...axis, size: 26, gap: 4, grid: { show: false }, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? printable(nameOf(tick), 12) : "")), space: named ? 90 : 50, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000] },
          { ...axis, size: 62, values: (_, ticks) => ticks.map(show) },
        ],
        series: [
          {},
          ...lines.map((line, index) => ({
            label: line.name,
            stroke: stroke(index),
            width: 2,
            spanGaps: true,
            ...(line.dashed ? { dash: [6, 4] } : {}),
            ...(bars ? { fill: stroke(index), paths: uPlot.paths.bars!({ size: [0.7, 40] }), points: { show: false } } : { points: { show: places.length < 3 } }),
          })),
        ],
        hooks: { setCursor: [(self) => setAt(self.cursor.idx ?? undefined)] },
      },
      data,
      place.current,
    );
    plot.current = made;
    const fitted = new ResizeObserver(([entry]) => made.setSize({ width: Math.max(100, entry!.contentRect.width), height: HEIGHT }));
    fitted.observe(place.current);
    return () => {
      fitted.disconnect();
      made.destroy();
      plot.current = undefined;
    };
  }, [names, dark, bars, places.length < 3]);
  useEffect(() => plot.current?.setData(data), [data]);
  const shown = at !== undefined && at < places.length ? at : places.length - 1;
  const where = places[shown];
  if (where === undefined) return null;
  return (
    <figure class="chart">
      <figcaption>
        <span class="strong">{title}</span>
        <span class="keys">
          {lines.map((line, index) => (
            <span key={line.name} class="key">
              <svg class="swatch" viewBox="0 0 1 1" aria-hidden="true"><rect class={`series-${(index % COLOURS.length) + 1}`} width="1" height="1" /></svg>
              {lines.length > 1 && <span>{printable(line.name, 40)}</span>}
              <span class="number">{line.values.has(where) ? show(line.values.get(where)!) : "–"}</span>
            </span>
          ))}
          <span class="quiet">{x} {printable(nameOf(where), 40)}</span>
        </span>
      </figcaption>
      <div ref={place} class="plot" role="img" aria-label={`${title}: ${lines.map((line) => `${line.name} ${summary(line, show)}`).join("; ")}`} />
      <details>
        <summary>Numbers</summary>
        <div class="scroll short" role="region" tabIndex={0} aria-label={`Numbers: ${title}`}>
          <table>
            <caption class="visually-hidden">{title}</caption>
            <thead>
              <tr><th scope="col">{x}</th>{lines.map((line) => <th key={line.name} scope="col" class="number">{printable(line.name, 40)}</th>)}</tr>
            </thead>
            <tbody>
              {[...places].reverse().slice(0, 500).map((each) => (
                <tr key={each}>
                  <th scope="row">{printable(nameOf(each), 60)}</th>
                  {lines.map((line) => <td key={line.name} class="number">{line.values.has(each) ? show(line.values.get(each)!) : "–"}</td>)}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      </details>
    </figure>
  );
}

function summary(line: Line, show: (value: number) => string): string {
  const values = [...line.values.values()];
  return values.length === 0 ? "none" : `from ${show(values[0]!)} to ${show(values.at(-1)!)}`;
}

/** A line without axes, for lists. */
export function Spark({ values, label }: { readonly values: readonly number[]; readonly label: string }) {
  if (values.length < 2) return <span class="spark" />;
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const points = values.map((value, at) => `${((100 * at) / (values.length - 1)).toFixed(1)},${(22 - (20 * (value - least)) / (most - least || 1)).toFixed(1)}`);
  return (
    <svg class="spark" role="img" aria-label={label} viewBox="0 0 100 24" preserveAspectRatio="none">
      <polyline points={points.join(" ")} />
    </svg>
  );
}
