/** The page behind a join link: see what is trained, pick data, join; afterwards watch, pause, leave, be forgotten. */
import { render } from "preact";
import { useEffect, useReducer, useState } from "preact/hooks";

import { Declined, type OpenJob } from "../edge_runtime/client.ts";
import { Samples, type Dataset } from "../edge_runtime/data/samples.ts";
import { largestFitting } from "../federation/capacity.ts";
import { messageOf } from "../federation/errors.ts";
import { loads, type Manifest } from "../federation/manifest.ts";
import { product } from "../federation/space.ts";
import { DataPicker } from "./data_picker.tsx";
import { BrowserDevice, suggestedMemory, suggestedThreads, type View } from "./device.ts";

const LOOK_AGAIN = 5000; // milliseconds until the page asks again whether a job runs
const MEMORIES = [64, 128, 256, 512, 1000, 2000]; // MB
const MB = 1e6;

interface Offered {
  readonly job: OpenJob;
  readonly manifest: Manifest;
}

/** Take the enrolment token out of the address: the fragment was never sent, and is not left in the history. */
function takeToken(): string | undefined {
  const found = /embrace_enrol_[\w-]+/.exec(location.hash)?.[0];
  if (found !== undefined) {
    sessionStorage.setItem("enrolment", found);
    history.replaceState(null, "", location.pathname);
  }
  return found ?? sessionStorage.getItem("enrolment") ?? undefined;
}

function Page({ invitation }: { readonly invitation: string | undefined }) {
  const [enrolment, setEnrolment] = useState(invitation);
  const [, redraw] = useReducer((count: number) => count + 1, 0);
  const [device, setDevice] = useState<BrowserDevice>();
  const [offered, setOffered] = useState<readonly Offered[]>();
  const [wrong, setWrong] = useState("");
  useEffect(() => {
    BrowserDevice.open(() => redraw(undefined)).then(setDevice, (error: unknown) => setWrong(messageOf(error)));
  }, []);
  const mayAsk = device !== undefined && (device.joined || enrolment !== undefined) && device.view.state !== "refused";
  useEffect(() => {
    if (!mayAsk) return;
    let timer: ReturnType<typeof setTimeout> | undefined;
    const look = async (): Promise<void> => {
      try {
        const jobs = await device.openJobs(enrolment);
        setOffered(jobs.map((job) => ({ job, manifest: loads(JSON.stringify(job.manifest)) })));
        setWrong("");
        if (jobs.length > 0) return;
      } catch (error) {
        setWrong(messageOf(error));
        if (error instanceof Declined && error.isFinal) return;
      }
      timer = setTimeout(() => void look(), LOOK_AGAIN);
    };
    void look();
    return () => clearTimeout(timer);
  }, [mayAsk]);

  if (device === undefined) return <p role="status">{wrong || "One moment …"}</p>;
  return (
    <>
      <h1>{device.joined ? device.record!.name : "Help to train a model"}</h1>
      {wrong && <p class="wrong" role="alert">{wrong}</p>}
      {device.joined ? (
        <Joined device={device} offered={offered} />
      ) : enrolment === undefined ? (
        <section>
          <p>This page needs a join link. Ask the person who runs the training for one, or scan their QR code.</p>
        </section>
      ) : (
        <Welcome device={device} offered={offered} enrolment={enrolment} used={() => setEnrolment(undefined)} />
      )}
    </>
  );
}

interface WelcomeProps {
  readonly device: BrowserDevice;
  readonly offered: readonly Offered[] | undefined;
  readonly enrolment: string;
  readonly used: () => void;
}

function Welcome({ device, offered, enrolment, used }: WelcomeProps) {
  const [name, setName] = useState(suggestedName());
  const [memory, setMemory] = useState(() => MB * (MEMORIES.findLast((size) => size * MB <= suggestedMemory()) ?? 64));
  const [pauseHidden, setHidden] = useState(false);
  const [pauseOnBattery, setOnBattery] = useState(true);
  const [pauseMetered, setMetered] = useState(true);
  const [busy, setBusy] = useState(false);
  const [wrong, setWrong] = useState("");
  const first = offered?.[0];
  const join = async (): Promise<void> => {
    setBusy(true);
    setWrong("");
    try {
      const threads = suggestedThreads();
      await device.join(enrolment, { name: name.trim(), memory, threads, pauseHidden, pauseOnBattery, pauseMetered });
      sessionStorage.removeItem("enrolment");
      used();
    } catch (error) {
      setWrong(messageOf(error));
    }
    setBusy(false);
  };
  return (
    <>
      <p>Your data stays in this browser. What leaves it is how the model changes, and how long that took.</p>
      <section>
        <h2>What is trained</h2>
        {offered === undefined ? <p class="quiet">Asking …</p> : offered.length === 0 ? <p class="quiet">No job runs now; this page looks again.</p> : null}
        {offered?.map((each) => <About key={each.job.id} {...each} />)}
      </section>
      {first && <DataSection device={device} manifest={first.manifest} />}
      <section>
        <h2>What it may take</h2>
        <label class="field">
          <span>Memory</span>
          <select value={memory} onChange={(event) => setMemory(Number(event.currentTarget.value))}>
            {MEMORIES.map((size) => (
              <option key={size} value={size * MB}>{memoryText(size * MB)}</option>
            ))}
          </select>
        </label>
        {first && <p class="quiet">{whatFits(first, memory)}</p>}
        <Tick checked={pauseOnBattery} set={setOnBattery}>Pause when the battery is below 30 %{levelOf(device.view)}</Tick>
        <Tick checked={pauseMetered} set={setMetered}>Pause on mobile data or a connection that saves data</Tick>
        <Tick checked={pauseHidden} set={setHidden}>Pause when this page is not visible</Tick>
        <label class="field">
          <span>Name of this device</span>
          <input type="text" value={name} maxLength={100} onInput={(event) => setName(event.currentTarget.value)} />
        </label>
      </section>
      {wrong && <p class="wrong" role="alert">{wrong}</p>}
      <button class="main" disabled={busy || device.data === undefined || !name.trim()} onClick={() => void join()}>
        {device.data === undefined ? "Pick data first" : "Join"}
      </button>
    </>
  );
}

function About({ job, manifest }: Offered) {
  const { classes, input } = manifest;
  return (
    <dl>
      <dt>Job</dt>
      <dd>{job.name}</dd>
      <dt>Model</dt>
      <dd>{manifest.name}: {manifest.layers.length} layers, {manifest.space.size.toLocaleString()} numbers</dd>
      <dt>It learns from</dt>
      <dd>{input.shape.length === 3 ? "pictures" : input.dtype === "int64" ? "texts as numbers" : "numbers"}, {input.shape.join(" × ") || "one each"}</dd>
      {manifest.classCount !== undefined && <dt>Classes</dt>}
      {manifest.classCount !== undefined && <dd>{classes ? classes.slice(0, 12).join(", ") + (classes.length > 12 ? ", …" : "") : manifest.classCount}</dd>}
      <dt>Rounds</dt>
      <dd>{job.round} of {job.rounds} done, {job.epochs ? `${job.epochs} passes over your data` : `${job.steps} steps of ${job.batch} samples`} in each</dd>
    </dl>
  );
}

function DataSection({ device, manifest }: { readonly device: BrowserDevice; readonly manifest: Manifest }) {
  const { data } = device;
  const [problem, setProblem] = useState("");
  useEffect(() => {
    try {
      if (data) new Samples(data, manifest);
      setProblem("");
    } catch (error) {
      setProblem(messageOf(error));
    }
  }, [data, manifest]);
  return (
    <section>
      <h2>Your data</h2>
      {data && <p>{describeData(data)}</p>}
      {problem && <p class="wrong" role="alert">{problem}</p>}
      <DataPicker manifest={manifest} picked={(found) => device.setData(found)} />
    </section>
  );
}

function Joined({ device, offered }: { readonly device: BrowserDevice; readonly offered: readonly Offered[] | undefined }) {
  const { view, record } = device;
  const paused = view.state === "paused";
  const last = view.reports.at(-1);
  return (
    <>
      <section aria-live="polite">
        <h2>{titleOf(view)}</h2>
        {view.why && view.state !== "training" && <p>{view.why}</p>}
        {view.trouble && <p class="wrong">{view.trouble}; trying again</p>}
        {view.progress && <progress aria-label={stageOf(view)} value={view.progress.done} max={view.progress.total} />}
        {view.progress && <p class="quiet">{stageOf(view)}: {view.progress.done} of {view.progress.total}</p>}
        <dl>
          {view.task && <dt>Model</dt>}
          {view.task && <dd>{view.task.model}, round {view.task.round + 1}: {view.task.trained} of {view.task.layers} layers, from {view.task.boundary}</dd>}
          <dt>Rounds helped</dt>
          <dd data-testid="rounds">{view.reports.length}</dd>
          {last && <dt>Loss</dt>}
          {last && <dd>{last.loss?.toFixed(4)}</dd>}
          {last && <dt>Last round took</dt>}
          {last && <dd>{Number(last.seconds.wall).toFixed(1)} s, {size(last.bytes.downloaded)} down, {size(last.bytes.uploaded)} up</dd>}
          <dt>Memory</dt>
          <dd>{last?.memory.anonymous ? `${size(last.memory.anonymous)} of ` : ""}{memoryText(record!.memory)}</dd>
          <dt>Threads</dt>
          <dd>{view.threads}</dd>
          {view.battery !== undefined && <dt>Battery</dt>}
          {view.battery !== undefined && <dd>{Math.round(100 * view.battery)} %</dd>}
          <dt>Data</dt>
          <dd>{device.data ? describeData(device.data) : "none"}</dd>
        </dl>
        {view.events.length > 0 && <ol class="log">{view.events.map((event) => <li key={event}>{event}</li>)}</ol>}
      </section>
      {(paused || device.data === undefined) && offered?.[0] && <DataSection device={device} manifest={offered[0].manifest} />}
      {!["refused", "elsewhere"].includes(view.state) && (
        <div class="row">
          {paused ? (
            <button disabled={device.data === undefined} onClick={() => void device.resume()}>Go on</button>
          ) : (
            <button disabled={view.state === "pausing"} onClick={() => void device.pause()}>Pause</button>
          )}
        </div>
      )}
      {view.state !== "elsewhere" && <Goodbye device={device} />}
    </>
  );
}

function Goodbye({ device }: { readonly device: BrowserDevice }) {
  const [asked, setAsked] = useState<"leave" | "forget">();
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
    <section role="alertdialog" aria-label={yes}>
      <p>{what} What was learned from it stays in the model.</p>
      <div class="row">
        <button class="grave" onClick={() => void device.leave(asked === "forget")}>{yes}</button>
        <button onClick={() => setAsked(undefined)}>No</button>
      </div>
    </section>
  );
}

function Tick({ checked, set, children }: { readonly checked: boolean; readonly set: (on: boolean) => void; readonly children: preact.ComponentChildren }) {
  return (
    <label class="tick">
      <input type="checkbox" checked={checked} onChange={(event) => set(event.currentTarget.checked)} />
      <span>{children}</span>
    </label>
  );
}

function titleOf(view: View): string {
  return {
    off: "Getting ready",
    starting: "Getting ready",
    waiting: "Waiting for the next round",
    training: "Training",
    sending: "Sending what was learned",
    pausing: "Stopping",
    paused: "Paused",
    refused: "The coordinator does not know this device any more",
    elsewhere: "Another tab of this page is at work",
  }[view.state];
}

function stageOf({ progress }: View): string {
  return { forward: "Layers that stay as they are", evaluate: "Trying the model on what was held back" }[progress?.what ?? ""] ?? "Training steps";
}

function whatFits({ job, manifest }: Offered, memory: number): string {
  const found = largestFitting(manifest, job.batch, memory, []);
  if (found === undefined) return "No part of the model fits; allow more.";
  const trained = manifest.layers.length - found.boundary.layer;
  return `Trains ${trained} of ${manifest.layers.length} layers in about ${size(found.need)}, and downloads about ${size(4 * manifest.space.size)} a round.`;
}

function describeData(data: Dataset): string {
  const classes = new Set(Array.from(data.labels.data as ArrayLike<number | bigint>, Number)).size;
  return `${data.name}: ${data.inputs.shape[0]} samples of ${data.inputs.shape.slice(1).join(" × ") || "one number"}${product(data.labels.shape.slice(1)) === 1 ? `, ${classes} labels` : ""}`;
}

function size(bytes: number | undefined): string {
  const count = bytes ?? 0;
  return count < 1e4 ? `${count} bytes` : count < 1e6 ? `${(count / 1e3).toFixed(0)} kB` : `${(count / 1e6).toFixed(count < 1e7 ? 1 : 0)} MB`;
}

function memoryText(bytes: number): string {
  return bytes < 1e9 ? `${Math.round(bytes / MB)} MB` : `${bytes / 1e9} GB`;
}

function levelOf(view: View): string {
  return view.battery === undefined ? "" : ` (now ${Math.round(100 * view.battery)} %)`;
}

function suggestedName(): string {
  const brand = /iPhone|iPad|Android|Macintosh|Windows|CrOS|Linux/.exec(navigator.userAgent)?.[0] ?? "browser";
  return `${brand} ${Math.random().toString(36).slice(2, 6)}`;
}

const root = document.getElementById("root")!;
if (globalThis.isSecureContext) render(<Page invitation={takeToken()} />, root);
else root.textContent = "This page needs https (or localhost): without it the browser offers no checksums. Ask for a link that begins with https.";
