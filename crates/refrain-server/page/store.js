// Conversations, kept in this browser (IndexedDB) and in memory while the page is open.

const DATABASE = "refrain";
const STORE = "conversations";

/**
 * All conversations. Reads come from memory; `save` and `remove` write through to the browser, and other tabs are told.
 */
export class ConversationStore {
  #database;
  #byId = new Map();
  #channel = typeof BroadcastChannel === "undefined" ? null : new BroadcastChannel("refrain.conversations");

  /** Opens the store. Without a database (`problem` says why) conversations last as long as the page. */
  static async open({ onOtherTab }) {
    let database = null;
    let problem = null;
    let present = [];
    try {
      database = await openDatabase();
      present = await done(database.transaction(STORE).objectStore(STORE).getAll());
    } catch (error) {
      problem = error.message || error.name;
    }
    const store = new ConversationStore(database, present);
    store.#channel?.addEventListener("message", ({ data }) => store.#refresh(data, onOtherTab));
    return { store, problem };
  }

  constructor(database, present) {
    this.#database = database;
    for (const conversation of present) this.#byId.set(conversation.id, interrupted(conversation));
  }

  /** All conversations, the newest first. */
  list() {
    return [...this.#byId.values()].sort((a, b) => b.updated - a.updated);
  }

  get(id) {
    return this.#byId.get(id) ?? null;
  }

  async save(conversation) {
    this.#byId.set(conversation.id, conversation);
    await this.#write((store) => store.put(conversation));
    this.#channel?.postMessage({ id: conversation.id });
  }

  async remove(id) {
    this.#byId.delete(id);
    await this.#write((store) => store.delete(id));
    this.#channel?.postMessage({ id });
  }

  async #write(request) {
    if (!this.#database) return;
    const transaction = this.#database.transaction(STORE, "readwrite");
    await done(request(transaction.objectStore(STORE)));
  }

  async #refresh({ id }, onOtherTab) {
    if (!this.#database) return;
    const conversation = await done(this.#database.transaction(STORE).objectStore(STORE).get(id));
    if (conversation) this.#byId.set(id, conversation);
    else this.#byId.delete(id);
    onOtherTab(id);
  }
}

// A reply that was being written when the page was closed is over.
function interrupted(conversation) {
  for (const turn of conversation.turns) {
    if (turn.state === "open") turn.state = "stopped";
  }
  return conversation;
}

function openDatabase() {
  const request = indexedDB.open(DATABASE, 1);
  request.addEventListener("upgradeneeded", () => request.result.createObjectStore(STORE, { keyPath: "id" }));
  return done(request);
}

function done(request) {
  return new Promise((resolve, reject) => {
    request.addEventListener("success", () => resolve(request.result));
    request.addEventListener("error", () => reject(request.error));
    request.addEventListener("blocked", () => reject(new Error("another tab keeps an older version of the history open")));
  });
}
