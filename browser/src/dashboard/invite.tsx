/** A link and a QR code with which devices join. The token is in the fragment, which browsers do not send. */
import { generate } from "lean-qr";
import { useId, useMemo, useRef, useState } from "preact/hooks";

import { ask } from "./api.ts";
import { count } from "./format.ts";
import { Card, Heading, Wrong } from "./parts.tsx";

const LIVES: readonly (readonly [string, number])[] = [["an hour", 3600], ["a day", 86400], ["a week", 7 * 86400], ["30 days", 30 * 86400]];

export function Invite() {
  const [uses, setUses] = useState(20);
  const [seconds, setSeconds] = useState(7 * 86400);
  const [made, setMade] = useState<{ link: string; token: string; uses: number; life: string }>();
  const [wrong, setWrong] = useState("");
  const [busy, setBusy] = useState(false);
  const make = async (event: Event): Promise<void> => {
    event.preventDefault();
    setBusy(true);
    try {
      const { token } = await ask<{ token: string }>("/v1/enrolments", "POST", { uses, seconds });
      setMade({ link: `${location.origin}/join#${token}`, token, uses, life: LIVES.find(([, value]) => value === seconds)![0] });
      setWrong("");
    } catch (error) {
      setWrong(error instanceof Error ? error.message : String(error));
    }
    setBusy(false);
  };
  return (
    <>
      <Heading back={{ href: "#/devices", text: "Devices" }}>Add devices</Heading>
      <div class="grid two">
        <Card title="A join link">
          <p>A person opens the link or scans the code, picks data, and the browser is a device. The data stays there.</p>
          <form class="form" onSubmit={(event) => void make(event)}>
            <label class="field"><span>Devices that it enrols</span><input type="number" min={1} max={1_000_000} required value={uses} onInput={(event) => setUses(event.currentTarget.valueAsNumber)} /></label>
            <label class="field">
              <span>It is good for</span>
              <select value={seconds} onChange={(event) => setSeconds(Number(event.currentTarget.value))}>
                {LIVES.map(([name, value]) => <option key={value} value={value}>{name}</option>)}
              </select>
            </label>
            {wrong && <Wrong>{wrong}</Wrong>}
            <div class="row"><button class="main" disabled={busy}>{made ? "Make another" : "Make a link"}</button></div>
          </form>
          {["127.0.0.1", "localhost", "[::1]"].includes(location.hostname) && <p class="quiet">This page was opened on this machine itself ({location.host}): other devices cannot reach that address. Open it by the coordinator’s own name before you make a link for them.</p>}
        </Card>
        <Card title={made ? `For ${count(made.uses, "device")}, for ${made.life}` : "The code"}>
          {made ? <Made {...made} /> : <div class="empty"><p class="quiet">The link and its QR code appear here. They are shown once, and kept nowhere.</p></div>}
        </Card>
      </div>
    </>
  );
}

function Made({ link, token }: { readonly link: string; readonly token: string }) {
  return (
    <div class="made">
      <Code text={link} />
      <Copied name="Join link" text={link} />
      <Copied name="For an agent" text={`embrace agent --server ${location.origin} --token ${token} --data data.npz`} />
    </div>
  );
}

function Code({ text }: { readonly text: string }) {
  const { path, side } = useMemo(() => {
    const code = generate(text);
    let path = "";
    for (let y = 0; y < code.size; y += 1) for (let x = 0; x < code.size; x += 1) if (code.get(x, y)) path += `M${x + 4} ${y + 4}h1v1h-1z`;
    return { path, side: code.size + 8 };
  }, [text]);
  return (
    <svg class="qr" role="img" aria-label="QR code of the join link" viewBox={`0 0 ${side} ${side}`} shape-rendering="crispEdges">
      <rect width={side} height={side} fill="#fff" />
      <path d={path} fill="#000" />
    </svg>
  );
}

function Copied({ name, text }: { readonly name: string; readonly text: string }) {
  const field = useRef<HTMLInputElement>(null);
  const [done, setDone] = useState(false);
  const id = useId();
  const copy = async (): Promise<void> => {
    field.current?.select();
    try {
      await navigator.clipboard.writeText(text);
      setDone(true);
    } catch {
      setDone(document.execCommand("copy")); // a page without https has no clipboard
    }
  };
  return (
    <div class="field copied">
      <label for={id}>{name}</label>
      <span class="row tight">
        <input id={id} ref={field} type="text" readOnly value={text} onFocus={(event) => event.currentTarget.select()} />
        <button type="button" onClick={() => void copy()}>{done ? "Copied" : "Copy"}<span class="visually-hidden"> {name}</span></button>
      </span>
    </div>
  );
}
