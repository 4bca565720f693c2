/** The page behind a join link: see what is trained, pick data, join; afterwards watch, pause, leave, be forgotten. */
import { render } from "preact";
import { useEffect, useReducer, useRef, useState } from "preact/hooks";

import { Declined } from "../edge_runtime/client.ts";
import { messageOf } from "../federation/errors.ts";
import { BrowserDevice } from "./device.ts";
import { Joined } from "./joined.tsx";
import { offer, type Offered } from "./offered.ts";
import { Welcome } from "./welcome.tsx";

const LOOK_AGAIN = 5000; // milliseconds until the page asks again whether a job runs
const KEPT = "enrolment"; // until the tab is closed

/** Take the enrolment token out of the address: the fragment was never sent, and is not left in the history. */
function takeToken(): string | undefined {
  const found = /embrace_enrol_[\w-]+/.exec(location.hash)?.[0];
  if (found !== undefined) {
    sessionStorage.setItem(KEPT, found);
    history.replaceState(null, "", location.pathname);
  }
  return found ?? sessionStorage.getItem(KEPT) ?? undefined;
}

function Page() {
  const [enrolment, setEnrolment] = useState(takeToken);
  const [, redraw] = useReducer((count: number) => count + 1, 0);
  const [device, setDevice] = useState<BrowserDevice>();
  const [offered, setOffered] = useState<readonly Offered[]>();
  const [wrong, setWrong] = useState("");
  const [isOver, setOver] = useState(false); // the link is good for nothing any more
  const heading = useRef<HTMLHeadingElement>(null);
  useEffect(() => {
    BrowserDevice.open(() => redraw(undefined)).then(setDevice, (error: unknown) => setWrong(messageOf(error)));
    const another = (): void => setEnrolment(takeToken()); // a link that differs in its fragment loads no page
    addEventListener("hashchange", another);
    return () => removeEventListener("hashchange", another);
  }, []);
  const mayAsk = device !== undefined && (device.joined || enrolment !== undefined) && device.view.state !== "refused";
  useEffect(() => {
    if (!mayAsk) return;
    setOver(false);
    let timer: ReturnType<typeof setTimeout> | undefined;
    const look = async (): Promise<void> => {
      try {
        const jobs = await device.openJobs(enrolment);
        setOffered(jobs.map(offer));
        setWrong("");
        if (jobs.length > 0) return;
      } catch (error) {
        setWrong(messageOf(error));
        if (error instanceof Declined && error.isFinal) return setOver(true);
      }
      timer = setTimeout(() => void look(), LOOK_AGAIN);
    };
    void look();
    return () => clearTimeout(timer);
  }, [mayAsk, enrolment]);
  const joined = device?.joined;
  useEffect(() => heading.current?.focus(), [joined]); // another view begins

  if (device === undefined) return <p role="status">{wrong || "One moment …"}</p>;
  const forgetLink = (): void => {
    sessionStorage.removeItem(KEPT);
    setEnrolment(undefined);
  };
  return (
    <>
      <h1 ref={heading} tabIndex={-1}>{joined ? device.record!.name : "Help to train a model"}</h1>
      {wrong && !joined && <p class="wrong" role="alert">{wrong}</p>}
      {joined ? (
        <Joined device={device} offered={offered} invited={enrolment !== undefined} />
      ) : enrolment === undefined || isOver ? (
        <section>
          <p>This page needs a join link. Ask the person who runs the training for one, or scan their QR code.</p>
        </section>
      ) : (
        <Welcome device={device} offered={offered} enrolment={enrolment} joined={forgetLink} />
      )}
    </>
  );
}

function Insecure() {
  return (
    <section role="alert">
      <h1>This page needs https</h1>
      <p>On a plain http address the browser offers neither checksums nor threads, so it cannot train here.</p>
      <p>Ask the person who runs the training for a link that begins with https. They get one with:</p>
      <p><code>embrace serve --data DIR --tls auto</code></p>
      <p>On the machine that runs the coordinator, <code>http://localhost:{location.port || 80}/join</code> works as well.</p>
    </section>
  );
}

render(globalThis.isSecureContext ? <Page /> : <Insecure />, document.getElementById("root")!);
