#!/bin/sh
# The course's assignment, step by step: `make course` says where nanolm is and what to read.
# A finished step is passed over; one that was interrupted goes on where it was.
set -eu
: "${NANOLM:=nanolm}" "${SMALL:=embedded:tiny}" "${LARGE:=embedded:stories}"
: "${SST:=embedded:reviews}" "${GPT2:=}" "${MINUTES:=3}" "${COURSE:=runs/course}" "${PROMPT:=}"
if [ "$SMALL$PROMPT" = embedded:tiny ]; then PROMPT='the small cat'; fi

heading() { printf '\n=== %s ===\n' "$1"; }

# A command as it could be typed.
typed() {
    printf 'nanolm'
    for word; do
        case $word in
        '' | *[!A-Za-z0-9_.,:/=+-]*)
            printf " '%s'" "$(printf '%s' "$word" | sed "s/'/'\\\\''/g")"
            ;;
        *) printf ' %s' "$word" ;;
        esac
    done
    echo
}

show() {
    printf '$ ' && typed "$@"
    "$NANOLM" "$@"
}

# once NAME COMMAND...: trains into $COURSE/NAME, unless that was done before; NAME.command is how.
once() {
    out=$COURSE/$1 && shift
    set -- "$@" --out "$out"
    if grep -qs '^ "result"' "$out/run.json"; then
        # Finished; but with the same files and settings?
        before=$(cat "$out.command" 2>/dev/null || echo 'one that make course did not keep')
        if [ "$(typed "$@")" != "$before" ]; then
            printf '%s\n' "error: $out is there already, made by another command:" "  $before" \
                "for other files or settings, choose another folder: COURSE=runs/NAME" >&2
            exit 2
        fi
        printf '$ %s\n%s is finished: passed over\n' "$before" "$out"
        return
    fi
    mkdir -p "$COURSE"
    typed "$@" >"$out.command"
    show "$@"
}

heading '1. The nano model (3 layers, 3 heads, width 48) on a small text'
once small train "$SMALL" --preset nano

heading '2. Each word with its probability, and the six likeliest at each place'
show sample "$COURSE/small" --prompt "$PROMPT" --tokens 12 --seed 3 --show probs
show sample "$COURSE/small" --prompt "$PROMPT" --tokens 12 --seed 3 --show top=6 \
    --html "$COURSE/words.html"

heading '3. A larger text'
once large train "$LARGE" --minutes "$MINUTES"
show sample "$COURSE/large" --prompt '' --tokens 150 --seed 1

heading '4. Good or bad? The larger model fine-tuned on the first 1,200 sentences'
once sentiment finetune-sentiment "$SST" --limit 1200 --from "$COURSE/large"
show classify "$COURSE/sentiment" 'The food was good, not bad at all.' \
    'The food was bad, not good at all.'

heading '5. The same sentences, but nothing learned before'
once scratch finetune-sentiment "$SST" --limit 1200 --from none

heading "6. The same sentences, from somebody else's GPT-2"
if [ "$GPT2" ]; then
    once gpt2 finetune-sentiment "$SST" --limit 1200 --from "$GPT2"
else
    echo 'left out; with a model folder, or a name on the Hugging Face Hub: make course GPT2=gpt2'
fi

printf '\nEverything is in %s. What to look at, and why it is so: docs/course.md\n' "$COURSE"
