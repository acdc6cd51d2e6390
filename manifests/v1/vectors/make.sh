#!/usr/bin/env bash
# Makes the vectors of format 1 with bash, coreutils and b3sum alone, so that no encoder of this project has a hand in them:
#
#   manifests/v1/vectors/make.sh manifests/v1/vectors
#
# Every document below is written out by hand; every digest is what b3sum (1.2.0 was used) prints. The first argument is the
# folder that is written: digests.jsonl, merkle.jsonl, tensors.jsonl, packs.jsonl, checkpoints.jsonl, and store/, a whole
# store with two checkpoints. A second run gives the same files.
set -euo pipefail
export LC_ALL=C

out=${1:?the folder to write}
mkdir -p "$out"
rm -rf "$out/store" "$out"/*.jsonl

plain() { b3sum --no-names; }                        # stdin: bytes; prints 64 hex digits
derive() { b3sum --no-names --derive-key "$1"; }     # the same under a derive_key context
unhex() {                                            # hex to bytes
  local i
  for ((i = 0; i < ${#1}; i += 2)); do printf "\\x${1:i:2}"; done
}
repeat() { head -c "$2" /dev/zero | tr '\0' "\\$(printf %03o "0x$1")"; } # byte (2 hex digits), times
line() { printf '%s\n' "$2" >>"$out/$1.jsonl"; }
list() {                                             # "a","b",... of the arguments
  local item text=""
  for item in "$@"; do text+="${text:+,}\"$item\""; done
  printf '[%s]' "$text"
}

# ---- plain digests ---------------------------------------------------------------------------------------------------

for spec in 00:0 00:1 00:64 ab:65 00:1024 ff:1025 01:262143 01:262144 00:16777216 00:16777217; do
  byte=${spec%:*} times=${spec#*:}
  line digests "{\"byte\":\"$byte\",\"times\":$times,\"digest\":\"$(repeat "$byte" "$times" | plain)\"}"
done

# ---- Merkle trees (RFC 6962 shape) -----------------------------------------------------------------------------------

leaf_hex() { unhex "$2" | derive "ckptstore 1 $1 leaf"; }                  # subject, leaf bytes as hex
leaf_text() { printf %s "$2" | derive "ckptstore 1 $1 leaf"; }             # subject, leaf bytes as text
tree_head() {                                                              # subject, hashed leaves
  local subject=$1 k=1
  shift
  if (($# == 0)); then printf '' | derive "ckptstore 1 $subject node" && return; fi
  if (($# == 1)); then printf '%s' "$1" && return; fi
  while ((k * 2 < $#)); do k=$((k * 2)); done
  unhex "$(tree_head "$subject" "${@:1:k}")$(tree_head "$subject" "${@:k+1}")" | derive "ckptstore 1 $subject node"
}
tree_root() { printf %s "$2" | derive "ckptstore 1 $1 root"; }             # subject, statement

merkle() { # name, subject, bound fields before "count" (with comma), bound fields between "count" and "tree", leaves as hex
  local name=$1 subject=$2 before=$3 between=$4 leaves=() item head
  shift 4
  for item in "$@"; do leaves+=("$(leaf_hex "$subject" "$item")"); done
  head=$(tree_head "$subject" ${leaves[@]+"${leaves[@]}"})
  local statement="{$before\"count\":$#,$between\"tree\":\"$head\"}"
  line merkle "{\"name\":\"$name\",\"subject\":\"$subject\",\"leaves\":$(list "$@"),\"head\":\"$head\",\"statement\":\"${statement//\"/\\\"}\",\"root\":\"$(tree_root "$subject" "$statement")\"}"
}
A=61 B=62 C=63 D=64 E=65
merkle "0 leaves" state "" ""
merkle "1 leaf" state "" "" $A
merkle "1 empty leaf" state "" "" ""
merkle "2 leaves" state "" "" $A $B
merkle "2 leaves swapped" state "" "" $B $A
merkle "3 leaves" state "" "" $A $B $C
merkle "3 leaves, the last one doubled" state "" "" $A $B $C $C
merkle "5 leaves" state "" "" $A $B $C $D $E
merkle "1 leaf that is two hashed leaves joined" state "" "" "$(leaf_hex state $A)$(leaf_hex state $B)"
merkle "0 leaves of another subject" rng "" "\"shards\":1,"
merkle "2 leaves of another subject" rng "" "\"shards\":1," $A $B
merkle "2 leaves, another bound" rng "" "\"shards\":2," $A $B

# ---- tensors ---------------------------------------------------------------------------------------------------------

CHUNK=16777216
tensor_digest() { # dtype, shape, length, chunk digests
  local dtype=$1 shape=$2 length=$3 leaves=() item head
  shift 3
  for item in "$@"; do leaves+=("$(leaf_hex tensor "$item")"); done
  head=$(tree_head tensor ${leaves[@]+"${leaves[@]}"})
  tree_root tensor "{\"chunk\":$CHUNK,\"count\":$#,\"dtype\":\"$dtype\",\"length\":$length,\"shape\":$shape,\"tree\":\"$head\"}"
}
tensor() { # dtype, shape, length in bytes; chunk number k is filled with the byte k
  local dtype=$1 shape=$2 length=$3 rest=$3 k=0 size chunks=()
  while ((rest > 0)); do
    size=$((rest < CHUNK ? rest : CHUNK))
    chunks+=("$(repeat "$(printf %02x $k)" $size | plain)")
    rest=$((rest - size)) k=$((k + 1))
  done
  line tensors "{\"dtype\":\"$dtype\",\"shape\":$shape,\"length\":$length,\"chunks\":$(list ${chunks[@]+"${chunks[@]}"}),\"digest\":\"$(tensor_digest "$dtype" "$shape" "$length" ${chunks[@]+"${chunks[@]}"})\"}"
}
tensor f32 '[]' 4
tensor f32 '[1]' 4
tensor i32 '[1]' 4
tensor f32 '[0]' 0
tensor f32 '[0,3]' 0
tensor f32 '[3,0]' 0
tensor bf16 '[0]' 0
tensor u8 '[64]' 64
tensor u8 '[65]' 65
tensor u8 '[16777216]' 16777216
tensor u8 '[16777217]' 16777217
tensor f32 '[4,1048576]' 16777216
tensor f64 '[3,2,1048576]' 50331648
tensor bf16 '[33554433]' 67108866

# ---- packs -----------------------------------------------------------------------------------------------------------

ender=0
while (((0x$(printf "t%d" $ender | plain | head -c 2) & 63) != 0)); do ender=$((ender + 1)); done
packs() { # name, items "path:byte:times" as one argument, then each pack as "byte:times ..." (one argument a pack)
  local name=$1 items="" item pack piece digests=()
  for item in $2; do
    IFS=: read -r path byte times <<<"$item"
    items+="${items:+,}{\"path\":\"$path\",\"byte\":\"$byte\",\"times\":$times}"
  done
  shift 2
  for pack in "$@"; do
    digests+=("$(for piece in $pack; do repeat "${piece%:*}" "${piece#*:}"; done | plain)")
  done
  line packs "{\"name\":\"$name\",\"items\":[$items],\"packs\":$(list "${digests[@]}")}"
}
packs "one pack, first occurrences only" "a:01:100 b:02:200 c:01:100 d:03:65" "01:100 02:200 03:65"
packs "a pack ends after t$ender" "a:01:100 t$ender:02:200 u:03:300" "01:100 02:200" "03:300"
packs "a pack ends after t$ender although its chunk is a repetition" "a:01:100 t$ender:01:100 u:03:300" "01:100" "03:300"
full="" first=""
for ((k = 0; k < 65; k++)); do # 65 chunks of 256 KiB - 1: 64 fit into 16 MiB
  full+="p$(printf %03d $k):$(printf %02x $((k + 1))):262143 "
  ((k < 64)) && first+="$(printf %02x $((k + 1))):262143 "
done
ends=0
for ((k = 0; k < 65; k++)); do ((0x$(printf "p%03d" $k | plain | head -c 2) & 63)) || ends=1; done
((ends == 0)) || { echo "a path of this vector ends a pack; choose other names" >&2; exit 1; }
packs "next fit at 16 MiB" "$full" "$first" "41:262143"

# ---- a store with two checkpoints ------------------------------------------------------------------------------------

store=$out/store
keep() { # folder, digest; stdin: bytes
  mkdir -p "$store/$1/${2:0:2}"
  cat >"$store/$1/${2:0:2}/$2"
}
document() { # text; prints the digest
  local digest
  digest=$(printf %s "$1" | plain)
  printf %s "$1" | keep documents "$digest"
  printf %s "$digest"
}

mkdir -p "$store"
printf %s '{"chunk":16777216,"digest":"blake3","format":1,"id":"000102030405060708090a0b0c0d0e0f","kind":"store"}' >"$store/ckptstore.json"

# A tensor "w" of 128 bytes (its only chunk lies in a pack), an inline buffer "seen" (i64 96), a step counter (f32 3.0).
w=$(repeat 3f 128 | plain)
repeat 3f 128 | keep objects "$w"
w_digest=$(tensor_digest f32 '[4,8]' 128 "$w")
seen=6000000000000000
seen_digest=$(tensor_digest i64 '[]' 8 "$(unhex $seen | plain)")
steps=00004040
steps_digest=$(tensor_digest f32 '[]' 4 "$(unhex $steps | plain)")
hyper='{"t":"dict","v":[[{"t":"str","v":"lr"},{"t":"f64","v":"3fb999999999999a"}],[{"t":"str","v":"nesterov"},{"t":"bool","v":false}]]}'
selectors='{"t":"dict","v":[[{"t":"str","v":"foreach"},{"t":"none"}]]}'
optimizers="[{\"groups\":[{\"hyper\":$hyper,\"selectors\":$selectors}],\"name\":\"optimizer\",\"type\":\"torch.optim.sgd.SGD\"}]"

e_seen="{\"path\":\"seen\",\"role\":[\"buffer\"],\"tensor\":{\"digest\":\"b3:$seen_digest\",\"dtype\":\"i64\",\"inline\":\"$seen\",\"shape\":[]}}"
e_group='{"group":0,"path":"w","role":["hyper","optimizer"]}'
e_none='{"path":"w","role":["optim","optimizer","momentum_buffer"],"value":{"t":"none"}}'
e_step="{\"path\":\"w\",\"role\":[\"optim\",\"optimizer\",\"step\"],\"tensor\":{\"digest\":\"b3:$steps_digest\",\"dtype\":\"f32\",\"inline\":\"$steps\",\"shape\":[]}}"
e_w="{\"path\":\"w\",\"role\":[\"weight\"],\"tensor\":{\"chunks\":[\"b3:$w\"],\"digest\":\"b3:$w_digest\",\"dtype\":\"f32\",\"shape\":[4,8]}}"

# The state root: leaves sorted by path, then role; "w.tied" is another name of "w".
l_seen=$(leaf_text state "{\"path\":\"seen\",\"role\":[\"buffer\"],\"value\":{\"tensor\":\"b3:$seen_digest\"}}")
l_group=$(leaf_text state "{\"path\":\"w\",\"role\":[\"hyper\",\"optimizer\"],\"value\":{\"value\":$hyper}}")
l_none=$(leaf_text state '{"path":"w","role":["optim","optimizer","momentum_buffer"],"value":{"value":{"t":"none"}}}')
l_step=$(leaf_text state "{\"path\":\"w\",\"role\":[\"optim\",\"optimizer\",\"step\"],\"value\":{\"tensor\":\"b3:$steps_digest\"}}")
l_w=$(leaf_text state "{\"path\":\"w\",\"role\":[\"weight\"],\"value\":{\"tensor\":\"b3:$w_digest\"}}")
l_tied=$(leaf_text state '{"path":"w.tied","role":["alias"],"value":{"owner":"w"}}')
state_head=$(tree_head state "$l_seen" "$l_group" "$l_none" "$l_step" "$l_w" "$l_tied")
state_root=$(tree_root state "{\"count\":6,\"tree\":\"$state_head\"}")

rng0='{"dtype":"u8","shape":[4],"t":"tensor","v":"01020304"}'
rng1='{"dtype":"u8","shape":[4],"t":"tensor","v":"05060708"}'
rng_leaf() { leaf_text rng "{\"name\":\"generator.g\",\"shard\":$1,\"value\":$2}"; }
rng_root_one=$(tree_root rng "{\"count\":1,\"shards\":1,\"tree\":\"$(tree_head rng "$(rng_leaf 0 "$rng0")")\"}")
rng_root_two=$(tree_root rng "{\"count\":2,\"shards\":2,\"tree\":\"$(tree_head rng "$(rng_leaf 0 "$rng0")" "$(rng_leaf 1 "$rng1")")\"}")
rng_root_swapped=$(tree_root rng "{\"count\":2,\"shards\":2,\"tree\":\"$(tree_head rng "$(rng_leaf 0 "$rng1")" "$(rng_leaf 1 "$rng0")")\"}")

# Files: one plain, one executable that was a link; one left out.
note=$(printf 'hello\n' | plain)
printf 'hello\n' | keep objects "$note"
tree=$(document "{\"excluded\":[{\"path\":\"notes/draft.txt\",\"reason\":\"not read by the run\"}],\"files\":[{\"chunks\":[],\"link\":null,\"mode\":\"plain\",\"path\":\"empty\",\"size\":0},{\"chunks\":[\"b3:$note\"],\"link\":\"hello.txt\",\"mode\":\"executable\",\"path\":\"notes/hello\",\"size\":6}],\"format\":1,\"kind\":\"tree\"}")
preparation=$(document "{\"format\":1,\"inputs\":\"b3:$tree\",\"kind\":\"preparation\",\"plan\":\"b3:$tree\",\"sources\":\"b3:$tree\"}")

binding='{"t":"dict","v":[[{"t":"str","v":"threads"},{"t":"int","v":"2"}]]}'
progress='{"counters":[{"name":"optimizer.optimizer","tracks_step":true,"values":[[3,1]]},{"name":"scheduler.scheduler","tracks_step":true,"values":[[3,1]]}],"cursors":[{"name":"data","per_step":32,"position":96,"unit":"samples"}],"micro_index":0,"states":[{"kind":"scheduler","name":"scheduler","value":{"t":"dict","v":[[{"t":"str","v":"last_epoch"},{"t":"int","v":"3"}]]}}]}'

checkpoint() { # shards, ties, rng root, parent (null or a quoted digest)
  document "{\"binding\":$binding,\"deviations\":[],\"files\":null,\"format\":1,\"kind\":\"checkpoint\",\"parent\":$4,\"progress\":$progress,\"replicas\":[],\"rng_root\":\"b3:$3\",\"run\":\"b3:$preparation\",\"shards\":$1,\"state_root\":\"b3:$state_root\",\"step\":3,\"ties\":$2}"
}
shard() { # index, count, page digest, entries in it, role and path of the first, packs, rng value, optimizers, aliases
  document "{\"aliases\":$9,\"count\":$2,\"format\":1,\"index\":$1,\"kind\":\"shard\",\"optimizers\":$8,\"packs\":$6,\"pages\":[{\"count\":$4,\"digest\":\"b3:$3\",$5}],\"rng\":[{\"name\":\"generator.g\",\"value\":$7}]}"
}
ref() { # name, generation, previous, root, nonce
  local body="{\"generation\":$2,\"nonce\":\"$5\",\"previous\":$3,\"root\":\"b3:$4\"}" check
  check=$(printf %s "$body" | plain)
  mkdir -p "$store/refs/$1"
  printf %s "{\"check\":\"b3:$check\",\"format\":1,\"generation\":$2,\"kind\":\"ref\",\"nonce\":\"$5\",\"previous\":$3,\"root\":\"b3:$4\"}" >"$store/refs/$1/$(printf %016d "$2")"
}

# One owner: all entries in one shard, the tie is an alias of the shard.
page=$(document "{\"entries\":[$e_seen,$e_group,$e_none,$e_step,$e_w],\"format\":1,\"kind\":\"page\"}")
packs_w="[{\"digests\":[\"b3:$w\"],\"role\":[\"weight\"]}]"
tie='[{"owner":"w","path":"w.tied"}]'
one=$(shard 0 1 "$page" 5 '"path":"seen","role":["buffer"]' "$packs_w" "$rng0" "$optimizers" "$tie")
root_one=$(checkpoint "[\"b3:$one\"]" '[]' "$rng_root_one" null)
ref main 1 null "$root_one" 0123456789abcdef0123456789abcdef

# Two owners: the buffer in shard 0, the weight with its optimizer in shard 1, the tie declared by the checkpoint.
page0=$(document "{\"entries\":[$e_seen],\"format\":1,\"kind\":\"page\"}")
page1=$(document "{\"entries\":[$e_group,$e_none,$e_step,$e_w],\"format\":1,\"kind\":\"page\"}")
two0=$(shard 0 2 "$page0" 1 '"path":"seen","role":["buffer"]' '[]' "$rng0" '[]' '[]')
two1=$(shard 1 2 "$page1" 4 '"path":"w","role":["hyper","optimizer"]' "$packs_w" "$rng1" "$optimizers" '[]')
root_two=$(checkpoint "[\"b3:$two0\",\"b3:$two1\"]" "$tie" "$rng_root_two" "\"b3:$root_one\"")
previous=$(plain <"$store/refs/main/0000000000000001")
ref main 2 "\"b3:$previous\"" "$root_two" fedcba9876543210fedcba9876543210

closure() { # files of the store; prints the closure digest: canonical [[key, size], ...] sorted by key
  local key text=""
  while read -r key; do text+="${text:+,}[\"$key\",$(($(wc -c <"$store/$key")))]"; done
  printf '[%s]' "$text" | plain
}
key() { printf '%s/%s/%s\n' "$1" "${2:0:2}" "$2"; }
shared=$(key objects "$w"; key objects "$note"; key documents "$tree"; key documents "$preparation")
closure_one=$({ printf '%s\n' "$shared"; key documents "$page"; key documents "$one"; key documents "$root_one"; } | sort | closure)
closure_two=$({ printf '%s\n' "$shared"; for d in "$page0" "$page1" "$two0" "$two1" "$root_two"; do key documents "$d"; done; } | sort | closure)
attempt=$(printf 'attempt 0123456789abcdef0123456789abcdef' | plain)

line checkpoints "{\"name\":\"one owner\",\"root\":\"$root_one\",\"state_root\":\"$state_root\",\"rng_root\":\"$rng_root_one\",\"closure\":\"$closure_one\"}"
line checkpoints "{\"name\":\"two owners\",\"root\":\"$root_two\",\"state_root\":\"$state_root\",\"rng_root\":\"$rng_root_two\",\"closure\":\"$closure_two\"}"
line checkpoints "{\"name\":\"two owners, generators swapped\",\"rng_root\":\"$rng_root_swapped\"}"
line checkpoints "{\"name\":\"subject of an attempt's shard receipts\",\"attempt\":\"0123456789abcdef0123456789abcdef\",\"digest\":\"$attempt\"}"
