/** The pieces that every view is made of. */
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { printable } from "../federation/printable.ts";
import { size } from "./format.ts";
import type { Loaded } from "./live.ts";

/** Text from outside: a name, a message. It is rendered here and nowhere else. */
export function Outside({ text, most = 80 }: { readonly text: string; readonly most?: number }) {
  const shown = printable(text, most);
  return <bdi title={shown.endsWith("…") ? printable(text) : undefined}>{shown}</bdi>;
}

const TONES: Readonly<Record<string, string>> = {
  running: "good", working: "good", arrived: "good", leased: "busy", offered: "idle", waiting: "idle", collecting: "good", selecting: "idle",
  paused: "warn", benched: "warn", late: "warn", expired: "bad", failed: "bad", lost: "bad", abandoned: "bad", stopped: "idle", done: "done", gone: "off", revoked: "off",
};

export function Badge({ state, text }: { readonly state: string; readonly text?: string }) {
  return <span class={`badge ${TONES[state] ?? "idle"}`}>{text ?? state}</span>;
}

export function Card({ title, side, children, wide }: { readonly title?: ComponentChildren; readonly side?: ComponentChildren; readonly children: ComponentChildren; readonly wide?: boolean }) {
  return (
    <section class={wide ? "card wide" : "card"}>
      {title !== undefined && (
        <header>
          <h2>{title}</h2>
          {side !== undefined && <div class="side">{side}</div>}
        </header>
      )}
      {children}
    </section>
  );
}

export function Empty({ title, children }: { readonly title: string; readonly children?: ComponentChildren }) {
  return (
    <div class="empty">
      <p class="strong">{title}</p>
      {children}
    </div>
  );
}

/** What is shown while a question is open, or when it was answered with no. */
export function Pending({ of }: { readonly of: Loaded<unknown> }) {
  if (of.wrong === "") return <div class="loading" role="status"><span class="visually-hidden">Loading …</span></div>;
  return <Wrong>{of.wrong}</Wrong>;
}

export function Wrong({ children }: { readonly children: string }) {
  return <p class="wrong" role="alert">{printable(children)}</p>;
}

export function Bar({ share, label, tone = "good" }: { readonly share: number; readonly label: string; readonly tone?: string }) {
  const width = Math.max(0, Math.min(100, 100 * share));
  return (
    <svg class={`bar ${tone}`} role="img" aria-label={label} viewBox="0 0 100 6" preserveAspectRatio="none">
      <rect class="ground" width="100" height="6" />
      <rect class="part" width={width} height="6" />
    </svg>
  );
}

/** Memory used of allowed. Without a budget there is no share to show. */
export function Memory({ used, allowed }: { readonly used: number | undefined; readonly allowed: number | null | undefined }) {
  if (used === undefined && allowed == null) return <span class="quiet">–</span>;
  if (allowed == null) return <span>{size(used)}</span>;
  if (used === undefined) return <span>up to {size(allowed)}</span>;
  const share = used / allowed;
  const label = `${size(used)} of ${size(allowed)}`;
  return (
    <span class="meter">
      <span>{label}</span>
      <Bar share={share} label={label} tone={share > 1 ? "bad" : share > 0.9 ? "warn" : "good"} />
    </span>
  );
}

const PARTS: readonly (readonly [string, string])[] = [
  ["download", "Download"], ["load", "Load"], ["forward", "Frozen layers"], ["activation_io", "Activations"], ["training", "Training"],
  ["state", "Kept state"], ["evaluation", "Evaluation"], ["other", "Other"],
];

/** Seconds by part, as one bar. */
export function Parts({ seconds }: { readonly seconds: Readonly<Record<string, number>> }) {
  const shown = PARTS.map(([key, name]) => ({ name, value: seconds[key] ?? 0 })).filter((part) => part.value > 0);
  const total = shown.reduce((sum, part) => sum + part.value, 0);
  if (total === 0) return <span class="quiet">–</span>;
  let at = 0;
  const label = shown.map((part) => `${part.name} ${part.value.toFixed(2)} s`).join(", ");
  return (
    <svg class="parts" role="img" aria-label={label} viewBox="0 0 100 8" preserveAspectRatio="none">
      <title>{label}</title>
      {shown.map((part) => {
        const x = at;
        at += (100 * part.value) / total;
        return <rect key={part.name} class={`part-${PARTS.findIndex(([, name]) => name === part.name)}`} x={x} width={(100 * part.value) / total} height="8" />;
      })}
    </svg>
  );
}

export function PartsTable({ seconds, names = false }: { readonly seconds: Readonly<Record<string, number>>; readonly names?: boolean }) {
  const rows = PARTS.map(([key, name], at) => ({ name, at, value: seconds[key] })).filter((row) => row.value !== undefined);
  return (
    <ul class="legend">
      {rows.map((row) => (
        <li key={row.name}>
          <svg class="swatch" viewBox="0 0 1 1" aria-hidden="true"><rect class={`part-${row.at}`} width="1" height="1" /></svg>
          {row.name} {!names && <span class="number">{row.value!.toFixed(2)} s</span>}
        </li>
      ))}
    </ul>
  );
}

export interface Column<Row> {
  readonly name: string;
  readonly cell: (row: Row) => ComponentChildren;
  readonly key?: (row: Row) => number | string; // a column that has one can be sorted by
  readonly numeric?: boolean;
  readonly falling?: boolean; // the first press sorts the largest first
}

interface TableProps<Row> {
  readonly caption: string;
  readonly columns: readonly Column<Row>[];
  readonly rows: readonly Row[];
  readonly id: (row: Row) => string;
  readonly most?: number;
}

/** A table that can be sorted; on a phone every row becomes a card. */
export function Table<Row>({ caption, columns, rows, id, most = 250 }: TableProps<Row>) {
  const [order, setOrder] = useState<{ name: string; falling: boolean }>();
  const [all, setAll] = useState(false);
  const by = columns.find((column) => column.name === order?.name)?.key;
  const sorted = by === undefined ? rows : [...rows].sort((a, b) => compare(by(a), by(b)) * (order!.falling ? -1 : 1));
  const press = (column: Column<Row>): void =>
    setOrder(order?.name !== column.name ? { name: column.name, falling: column.falling ?? false } : order.falling === (column.falling ?? false) ? { name: column.name, falling: !order.falling } : undefined);
  return (
    <>
      <div class="scroll">
        <table class="stack">
          <caption class="visually-hidden">{caption}</caption>
          <thead>
            <tr>
              {columns.map((column) => (
                <th key={column.name} scope="col" class={column.numeric ? "number" : undefined} aria-sort={order?.name !== column.name ? undefined : order.falling ? "descending" : "ascending"}>
                  {column.key === undefined ? column.name : (
                    <button class="sort" onClick={() => press(column)}>
                      {column.name}
                      <span aria-hidden="true">{order?.name !== column.name ? "" : order.falling ? " ↓" : " ↑"}</span>
                    </button>
                  )}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {(all ? sorted : sorted.slice(0, most)).map((row) => (
              <tr key={id(row)}>
                {columns.map((column, at) => {
                  const content = column.cell(row);
                  const name = column.numeric ? "number" : undefined;
                  return at === 0 ? <th key={column.name} scope="row">{content}</th> : <td key={column.name} class={name} data-label={column.name}>{content}</td>;
                })}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {!all && rows.length > most && <p><button onClick={() => setAll(true)}>Show all {rows.length}</button></p>}
    </>
  );
}

function compare(a: number | string, b: number | string): number {
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });
}

interface ConfirmProps {
  readonly label: string;
  readonly title: string;
  readonly yes: string;
  readonly act: () => Promise<void>;
  readonly children: ComponentChildren;
}

/** A button that asks before it does what cannot be undone. */
export function Confirm({ label, title, yes, act, children }: ConfirmProps) {
  const dialog = useRef<HTMLDialogElement>(null);
  const [busy, setBusy] = useState(false);
  const [wrong, setWrong] = useState("");
  const go = async (): Promise<void> => {
    setBusy(true);
    try {
      await act();
      dialog.current?.close();
    } catch (error) {
      setWrong(error instanceof Error ? error.message : String(error));
    }
    setBusy(false);
  };
  return (
    <>
      <button class="grave" onClick={() => (setWrong(""), dialog.current?.showModal())}>{label}</button>
      <dialog ref={dialog} aria-label={title}>
        <h2>{title}</h2>
        {children}
        {wrong && <Wrong>{wrong}</Wrong>}
        <div class="row end">
          <button onClick={() => dialog.current?.close()}>Cancel</button>
          <button class="grave main" disabled={busy} onClick={() => void go()}>{yes}</button>
        </div>
      </dialog>
    </>
  );
}

export function Heading({ children, back }: { readonly children: ComponentChildren; readonly back?: { readonly href: string; readonly text: string } }) {
  const heading = useRef<HTMLHeadingElement>(null);
  useEffect(() => heading.current?.focus({ preventScroll: true }), []);
  return (
    <>
      {back && <p class="back"><a href={back.href}>← {back.text}</a></p>}
      <h1 ref={heading} tabIndex={-1}>{children}</h1>
    </>
  );
}

export function Fact({ name, children }: { readonly name: string; readonly children: ComponentChildren }) {
  return (
    <div class="fact">
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}
