/** The administrator's page: sign in, then jobs, devices and what they do, as it happens. */
import { render, type ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";

import { ask, onSignedOut, Refusal, signIn, signOut } from "./api.ts";
import { Benchmarks } from "./benchmarks.tsx";
import { Create } from "./create.tsx";
import { Device } from "./device.tsx";
import { Fleet } from "./fleet.tsx";
import { Invite } from "./invite.tsx";
import { Job } from "./job.tsx";
import { Jobs } from "./jobs.tsx";
import { live, useStream } from "./live.ts";
import { Card, Empty, Heading, Wrong } from "./parts.tsx";

const VIEWS: readonly (readonly [RegExp, (id: string) => ComponentChildren])[] = [
  [/^\/?$/, () => <Jobs />],
  [/^\/new$/, () => <Create />],
  [/^\/jobs\/([0-9a-f]{1,64})$/, (id) => <Job id={id} />],
  [/^\/devices$/, () => <Fleet />],
  [/^\/devices\/([\w.-]{1,128})$/, (id) => <Device id={id} />],
  [/^\/join$/, () => <Invite />],
  [/^\/benchmarks$/, () => <Benchmarks />],
];
const PLACES: readonly (readonly [string, string, RegExp])[] = [
  ["#/", "Jobs", /^\/?$|^\/(jobs|new)/],
  ["#/devices", "Devices", /^\/(devices|join)/],
  ["#/benchmarks", "Benchmarks", /^\/benchmarks/],
];

type Session = "asking" | "out" | "in" | "unreachable";

function App() {
  const [session, setSession] = useState<Session>("asking");
  const [why, setWhy] = useState("");
  const begin = (): void => {
    ask("/v1/session").then(
      () => setSession("in"),
      (error: unknown) => setSession(error instanceof Refusal && error.status === 401 ? "out" : "unreachable"),
    );
  };
  useEffect(() => {
    onSignedOut(() =>
      setSession((known) => {
        if (known === "in") setWhy("Your session is over. Sign in again.");
        return "out";
      }),
    );
    begin();
  }, []);
  useEffect(() => {
    if (session !== "in") return;
    live.open();
    return () => live.close();
  }, [session]);
  if (session === "asking") return <main class="narrow"><div class="loading" role="status"><span class="visually-hidden">Loading …</span></div></main>;
  if (session === "unreachable") return <main class="narrow"><Card><Empty title="The coordinator cannot be reached"><p><button onClick={begin}>Try again</button></p></Empty></Card></main>;
  if (session === "out") return <SignIn why={why} done={() => (setWhy(""), setSession("in"))} />;
  return <Signed out={() => (setWhy("You are signed out."), setSession("out"))} />;
}

function SignIn({ why, done }: { readonly why: string; readonly done: () => void }) {
  const [token, setToken] = useState("");
  const [wrong, setWrong] = useState("");
  const [busy, setBusy] = useState(false);
  const go = async (event: Event): Promise<void> => {
    event.preventDefault();
    setBusy(true);
    try {
      await signIn(token.trim());
      done();
      return;
    } catch (error) {
      const status = error instanceof Refusal ? error.status : 0;
      setWrong(status === 401 ? "This is not the administrator’s token." : error instanceof Error ? error.message : String(error));
    }
    setToken("");
    setBusy(false);
  };
  return (
    <main class="narrow">
      <p class="brand"><Mark /> embrace</p>
      <Card>
        <Heading>Sign in</Heading>
        {why && !wrong && <p role="status">{why}</p>}
        <form class="form" onSubmit={(event) => void go(event)}>
          <label class="field">
            <span>Administrator’s token</span>
            <input type="password" autocomplete="current-password" required autofocus value={token} onInput={(event) => setToken(event.currentTarget.value)} />
          </label>
          {wrong && <Wrong>{wrong}</Wrong>}
          <button class="main whole" disabled={busy || token.trim() === ""}>Sign in</button>
        </form>
        <p class="quiet">It is in the file <code>admin.token</code> of the coordinator’s directory.</p>
      </Card>
      <p class="quiet centre">Do you want to train with this device? <a href="/join">Join</a> with the link that you were given.</p>
    </main>
  );
}

function Signed({ out }: { readonly out: () => void }) {
  const path = usePath();
  const { link } = useStream();
  const leave = async (): Promise<void> => {
    live.close();
    await signOut().catch(() => undefined);
    out();
  };
  const found = VIEWS.map(([pattern, view]) => ({ match: pattern.exec(path), view })).find(({ match }) => match !== null);
  useEffect(() => {
    document.title = `${PLACES.find(([, , here]) => here.test(path))?.[1] ?? "Not found"} – embrace`;
    scrollTo(0, 0);
  }, [path]);
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => (event.preventDefault(), document.querySelector<HTMLElement>("h1")?.focus())}>To the content</a>
      <header class="top">
        <a class="brand" href="#/"><Mark /> embrace</a>
        <nav aria-label="Main">
          {PLACES.map(([href, name, here]) => <a key={href} href={href} aria-current={here.test(path) ? "page" : undefined}>{name}</a>)}
        </nav>
        <span class={`link ${link}`} role="status">{{ live: "live", connecting: "connecting", lost: "connection lost" }[link]}</span>
        <button class="plain" onClick={() => void leave()}>Sign out</button>
      </header>
      <main id="main" key={path}>
        {found ? found.view(found.match![1] ?? "") : <><Heading>Not found</Heading><Card><Empty title="There is no such page"><p><a href="#/">All jobs</a></p></Empty></Card></>}
      </main>
    </>
  );
}

function usePath(): string {
  const now = (): string => location.hash.replace(/^#/, "");
  const [path, setPath] = useState(now());
  useEffect(() => {
    const changed = (): void => setPath(now());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return path;
}

function Mark() {
  return (
    <svg class="mark" viewBox="0 0 16 16" aria-hidden="true">
      <path d="M2 13a6 6 0 0 1 12 0" fill="none" stroke="currentColor" stroke-width="2.4" stroke-linecap="round" />
      <circle cx="8" cy="4.5" r="2.5" fill="currentColor" />
    </svg>
  );
}

render(<App />, document.getElementById("root")!);
