#!/bin/sh
# The course assignment, step by step. `make course` sets the path of nanolm and the files to use.
# Finished steps are skipped, and an interrupted one is resumed. With the argument `pairs`, it shows
# the way from the bottleneck to attention instead.
set -eu
: "${NANOLM:=nanolm}" "${SMALL:=embedded:tiny}" "${LARGE:=embedded:stories}"
: "${SST:=embedded:reviews}" "${SST_TEST:=}" "${GPT2:=}" "${MINUTES:=3}"
: "${COURSE:=runs/course}" "${PROMPT:=}" "${PAIR_MINUTES:=20}"
if [ "$SMALL$PROMPT" = embedded:tiny ]; then PROMPT='the small cat'; fi

heading() { printf '\n=== %s ===\n' "$1"; }

# Prints a command, quoted for the shell.
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

# once NAME COMMAND...: trains into $COURSE/NAME unless that run is finished, and draws its curves
# as SVG and PNG. NAME.command records the command.
once() {
    out=$COURSE/$1 && shift
    set -- "$@" --out "$out"
    if grep -qs '^ "result"' "$out/run.json"; then
        # Finished, but was it the same command?
        before=$(cat "$out.command" 2>/dev/null || echo '(not recorded by make course)')
        if [ "$(typed "$@")" != "$before" ]; then
            printf '%s\n' "error: $out already exists and was created by another command:" "  $before" \
                "to use other files or settings, choose another folder: COURSE=runs/NAME" >&2
            exit 2
        fi
        printf '$ %s\n%s is finished: skipped\n' "$before" "$out"
    else
        mkdir -p "$COURSE"
        typed "$@" >"$out.command"
        show "$@"
    fi
    show report "$out" --png
}

# label NAME OPTIONS...: fine-tunes on the first 1,200 rows. SST_TEST is used only for evaluation.
label() {
    name=$1 && shift
    if [ "$SST_TEST" ]; then set -- "$@" --test "$SST_TEST"; fi
    once "$name" finetune-sentiment "$SST" --limit 1200 "$@"
}

if [ "${1:-}" = pairs ]; then
    heading '1. One vector, attention, and nothing but attention'
    show compare embedded:veltish --budget "$PAIR_MINUTES" --out "$COURSE/veltish-compare"
    heading '2. What each model makes of a long sentence'
    long='a green mouse did not watch your three black old teachers when the happy teacher waited from castles.'
    for name in bottleneck attention transformer modern; do
        show translate "$COURSE/veltish-compare/$name/seed-1" "$long"
    done
    heading '3. Where the attention goes'
    short='the queen saw the seven happy big girls.'
    show translate "$COURSE/veltish-compare/attention/seed-1" "$short" --show attention
    show translate "$COURSE/veltish-compare/modern/seed-1" "$short" --show attention
    exit
fi

heading '1. The nano model (3 layers, 3 heads, width 48) on a small text'
once small train "$SMALL" --preset nano

heading '2. Each word with its probability, and the six most likely words at its position'
show sample "$COURSE/small" --prompt "$PROMPT" --tokens 12 --seed 3 --show words
show sample "$COURSE/small" --prompt "$PROMPT" --tokens 12 --seed 3 --show words=6 \
    --html "$COURSE/words.html" --csv "$COURSE/words.csv"

heading '3. A larger text'
once large train "$LARGE" --minutes "$MINUTES"
show sample "$COURSE/large" --prompt '' --tokens 150 --seed 1
show sample "$COURSE/large" --prompt '' --tokens 20 --seed 1 --show words=6

heading '4. Positive or negative? The larger model fine-tuned on the first 1,200 sentences'
label sentiment --from "$COURSE/large"
show classify "$COURSE/sentiment" 'The food was good, not bad at all.' \
    'The food was bad, not good at all.'

heading '5. The same sentences without pretraining'
label scratch --from none

heading '6. The same sentences with a Hugging Face model'
if [ "$GPT2" ]; then
    label gpt2 --from "$GPT2"
else
    echo 'skipped; to run it, give a model folder or a name on the Hugging Face Hub: make course GPT2=gpt2'
fi

heading 'Results'
show runs --folder "$COURSE"
printf '\nAll results are in %s. docs/course.md explains them.\n' "$COURSE"
printf '%s\n' 'Curves: loss.png, and epochs.png for classifiers (also as SVG).' \
    'Words: words.html and words.csv. Misclassified texts: mistakes.csv in each classifier run.'
