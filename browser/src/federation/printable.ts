/**
 * Render text that comes from outside, as federation/printable.py does: what does not print is written as an escape.
 *
 * Names and messages of devices are shown to people. A change of the reading direction or an invisible letter in them could show a
 * text that is not there.
 */

const MOST = 500; // characters of a text for people
const HIDDEN = /[\p{C}\p{Z}]/gu; // control, format, private, unassigned; and all separators, of which a blank is fine

export function printable(text: unknown, most = MOST): string {
  const whole = String(text);
  const letters = Array.from(whole.slice(0, 2 * most)); // a letter has up to two units
  const shown = letters.slice(0, most).join("").replace(HIDDEN, (letter) => (letter === " " ? letter : escaped(letter)));
  return Array.from(shown).length <= most && letters.length <= most ? shown : `${Array.from(shown).slice(0, most - 1).join("")}…`;
}

function escaped(letter: string): string {
  const named = { "\n": "\\n", "\r": "\\r", "\t": "\\t" }[letter];
  const code = letter.codePointAt(0)!;
  const digits = code.toString(16);
  return named ?? (code < 0x100 ? `\\x${digits.padStart(2, "0")}` : code < 0x10000 ? `\\u${digits.padStart(4, "0")}` : `\\U${digits.padStart(8, "0")}`);
}
