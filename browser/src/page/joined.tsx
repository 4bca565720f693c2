/** After joining: the round, the loss, what it takes; pause, leave, be forgotten. */
import { useEffect, useRef, useState } from "preact/hooks";

import { DataSection } from "./data_section.tsx";
import type { BrowserDevice, View } from "./device.ts";
import { describeData, memoryText, percent, size } from "./format.ts";
import { LayerBar } from "./layer_bar.tsx";
import { LossCurve } from "./loss_curve.tsx";
import type { Offered } from "./offered.ts";

const PLUG_IN = 0.5; // the level of a battery below which the page says so

interface Props {
  readonly device: BrowserDevice;
  readonly offered: readonly Offered[] | undefined;
  readonly invited: boolean; // with a new link
}

export function Joined({ device, offered, invited }: Props) {
  const { view } = device;
  const { task } = view;
  const paused = view.state === "paused";
  const refused = view.state === "refused";
  const busy = view.state === "pausing" || view.state === "measuring";
  const rounds = offered?.find(({ job }) => job.id === task?.job)?.job.rounds;
  const over = view.state === "waiting" && rounds !== undefined && task!.round + 1 >= rounds;
  const title = over ? "The last round is done" : titleOf(view);
  useEffect(() => void (document.title = `${title} · embrace`), [title]);
  const curve = task === undefined ? device.history : device.history.filter(({ job }) => job === task.job);
  return (
    <>
      <section>
        <div role="status"><h2>{title}</h2></div>
        {view.why && view.state !== "training" && <p>{view.why}</p>}
        {refused && <p>{invited ? "The new link lets this device join again." : "Ask the person who runs the training for a new link to join again."}</p>}
        {refused && invited && <button class="main" onClick={() => void device.leave(false)}>Join again</button>}
        {view.trouble && <p class="wrong" role="alert">{view.trouble}; trying again</p>}
        {view.state === "measuring" && <Progress view={view} />}
        {task && !refused && (
          <>
            <p class="round">Round {task.round + 1}{rounds ? ` of ${rounds}` : ""} <span class="quiet">{task.model}</span></p>
            <Progress view={view} />
            <LayerBar layers={task.layers} trained={task.trained} />
            <p class="quiet">Trains {task.trained} of {task.layers} layers, from {task.boundary}</p>
          </>
        )}
        <LossCurve rounds={curve} />
        {view.events.length > 0 && <ol class="log" aria-label="What happened">{view.events.map((event) => <li key={event}>{event}</li>)}</ol>}
      </section>
      <Facts device={device} />
      {(paused || device.data === undefined) && offered?.[0] && <DataSection title="Your data" device={device} manifest={offered[0].manifest} />}
      {!refused && view.state !== "elsewhere" && (
        paused ? (
          <button class="main" disabled={device.data === undefined} onClick={() => void device.resume()}>Go on</button>
        ) : (
          <button class="main" disabled={busy} onClick={() => void device.pause()}>Pause</button>
        )
      )}
      {!refused && view.state !== "elsewhere" && offered?.[0] && (
        <div class="row">
          <button disabled={busy} onClick={() => void device.measure(offered[0]!.job.id)}>Measure this device</button>
        </div>
      )}
      {view.state !== "elsewhere" && <Goodbye device={device} />}
    </>
  );
}

function Progress({ view }: { readonly view: View }) {
  const { progress } = view;
  const stage = stageOf(view);
  return (
    <>
      <progress aria-label={stage} value={progress?.done ?? 0} max={progress?.total ?? 1} />
      <p class="quiet">{progress ? `${stage}: ${progress.done} of ${progress.total}` : "\u00a0"}</p>
    </>
  );
}

function Facts({ device }: { readonly device: BrowserDevice }) {
  const { view, record, data } = device;
  const { battery, last } = view;
  const used = last?.memory.anonymous;
  return (
    <section>
      <h2>This device</h2>
      <dl>
        <dt>Rounds helped</dt>
        <dd data-testid="rounds">{device.history.length}</dd>
        {last && <dt>Last round</dt>}
        {last && <dd>{Number(last.seconds.wall).toFixed(1)} s, {size(last.bytes.downloaded)} down, {size(last.bytes.uploaded)} up</dd>}
        <dt>Memory</dt>
        <dd>
          {used === undefined ? "" : `${size(used)} of `}{memoryText(record!.memory)}
          {used !== undefined && <meter aria-label="Memory used of what you allow" value={used} max={record!.memory} />}
        </dd>
        <dt>Threads</dt>
        <dd>{view.threads}</dd>
        {battery && <dt>Battery</dt>}
        {battery && <dd>{percent(battery.level)}{battery.charging ? ", charging" : battery.level < PLUG_IN ? ": plug it in if you can" : ""}</dd>}
        <dt>Data</dt>
        <dd>{data ? describeData(data) : "none"}</dd>
      </dl>
    </section>
  );
}

function Goodbye({ device }: { readonly device: BrowserDevice }) {
  const [asked, setAsked] = useState<"leave" | "forget">();
  const question = useRef<HTMLElement>(null);
  useEffect(() => question.current?.focus(), [asked]);
  if (asked === undefined) {
    return (
      <div class="row">
        <button class="grave" onClick={() => setAsked("leave")}>Leave</button>
        <button class="grave" onClick={() => setAsked("forget")}>Forget me</button>
      </div>
    );
  }
  const [what, yes] = {
    leave: ["This device takes part no more, and the coordinator forgets its name. Your data stays in this browser.", "Yes, leave"],
    forget: ["This removes your data, the name and everything else of this device, here and at the coordinator.", "Yes, forget me"],
  }[asked] as [string, string];
  return (
    <section role="alertdialog" aria-label={yes} aria-describedby="goodbye" tabIndex={-1} ref={question}>
      <p id="goodbye">{what} What was learned from it stays in the model.</p>
      <div class="row">
        <button class="grave" onClick={() => void device.leave(asked === "forget")}>{yes}</button>
        <button onClick={() => setAsked(undefined)}>No</button>
      </div>
    </section>
  );
}

function titleOf({ state }: View): string {
  return {
    off: "Getting ready",
    starting: "Getting ready",
    waiting: "Waiting for the next round",
    training: "Training",
    sending: "Sending what was learned",
    pausing: "Stopping",
    paused: "Paused",
    measuring: "Measuring what training costs here",
    refused: "The coordinator does not know this device any more",
    elsewhere: "Another tab of this page is at work",
  }[state];
}

function stageOf({ progress }: View): string {
  return { measure: "Tiers measured", forward: "Layers that stay as they are", evaluate: "Trying the model on what was held back" }[progress?.what ?? ""] ?? "Training steps";
}
