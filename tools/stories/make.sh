#!/usr/bin/env bash
# Makes both built-in models in OUT: stories and conversations by SmolLM2, training, packed files, and a comparison
# of the story model with the current one. On one H200, it takes about eight minutes.
#
#   REFRAIN=refrain ./make.sh SMOLLM2.gguf OUT
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
smollm=$(realpath "$1")
refrain=${REFRAIN:-refrain}
device=${DEVICE:-cuda}
present=$(realpath "${PRESENT:-$here/../../crates/refrain/assets/stories.gguf}")
mkdir -p "$2"
cd "$2"

stage() { printf '\n== %s s: %s\n' "$SECONDS" "$*"; }
# Answers as many questions as the time allows; Ctrl-C leaves only complete lines.
answer() {
    local status=0
    timeout -k 15 -s INT "${TALK_SECONDS:-42}" "$refrain" batch "$smollm" "$1" -o "$2" --overwrite \
        --seqs "${SEQS:-256}" -c 384 --kv-tokens "${KV_TOKENS:-65536}" --device "$device" || status=$?
    [ "$status" -eq 0 ] || [ "$status" -eq 124 ]
    wc -l "$1" "$2"
}

stage stories
# shellcheck disable=SC2086
python3 "$here/generate.py" "$smollm" log.npy --seconds "${STORY_SECONDS:-230}" --seed "${SEED:-2}" \
    ${GENERATE_ARGS:---batch 8192 --prompts 720000}

stage corpus, and conversations of one answer in parallel
nice python3 "$here/corpus.py" "$smollm" log.npy . --least "${LEAST:-20}" >corpus.log 2>&1 &
corpus=$!
python3 "$here/conversations.py" ask asked-1.jsonl --n "${N_CONVERSATIONS:-100000}"
answer asked-1.jsonl said-1.jsonl

stage conversations of two answers
python3 "$here/conversations.py" follow asked-1.jsonl said-1.jsonl asked-2.jsonl
answer asked-2.jsonl said-2.jsonl

stage corpus
wait "$corpus" || { cat corpus.log; exit 1; }
head -n 12 corpus.log
python3 "$here/conversations.py" keep asked-1.jsonl said-1.jsonl asked-2.jsonl said-2.jsonl stories.txt . \
    --least "${LEAST_CONVERSATIONS:-12}" >conversations.log 2>&1 &
conversations=$!

stage story model
# shellcheck disable=SC2086
"$refrain" train "$here/stories.toml" --device "$device" ${STORY_ARGS:-}
python3 "$here/pack.py" stories/model.gguf stories.gguf --name "Refrain Stories" --description \
    "A small llama that writes short, simple English stories. Trained from scratch by refrain train on stories written by \
SmolLM2-135M-Instruct (Apache-2.0, Hugging Face) from prompts of hand-written word lists; the recipe is in tools/stories \
of the Refrain repository."

stage chat model
wait "$conversations" || { cat conversations.log; exit 1; }
cat conversations.log
# The unchanged weights of the built-in file, with a chat template.
python3 "$here/pack.py" stories.gguf chat-base.gguf --name "Refrain Stories" --description "The base of Refrain Chat." \
    --chat-template "$here/chat_template.jinja"
# shellcheck disable=SC2086
"$refrain" finetune "$here/chat.toml" --full --device "$device" ${CHAT_ARGS:-}
python3 "$here/pack.py" chat/model.gguf chat.gguf --name "Refrain Chat" --description \
    "A small llama that chats in simple English and tells short stories: Refrain Stories, trained further by refrain \
finetune on conversations written by SmolLM2-135M-Instruct (Apache-2.0, Hugging Face) and on its stories; the recipe is in \
tools/stories of the Refrain repository."

stage comparison
# shellcheck disable=SC2086
python3 "$here/compare.py" heldout-stories.txt "$present" stories.gguf ${COMPARE_ARGS:-}
for model in "$present" stories.gguf; do
    "$refrain" perplexity "$model" -f heldout-stories.txt -c 256 --chunks "${CHUNKS:-1000}" --device "$device"
done
stage ready
