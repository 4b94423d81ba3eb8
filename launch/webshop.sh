#!/usr/bin/env bash
# Fetches the official WebShop files from its authors' Google Drive, by gdown, and builds the catalogue of them.
#
#   bash launch/webshop.sh --size=small [--folder=data/webshop] [--nouns]
#
# --size    small: 1,000 products (a few MB); all: 1.18 million (several GB). Each into a folder of its own.
# --folder  where to (default data/webshop); what is there already is not fetched again
# --nouns   lists the nouns of titles by spaCy too, as the original's score has them (see envs/webshop/tag_nouns.py)
#
# The ids are those of setup.sh in the authors' repository (princeton-nlp/WebShop). Needs gdown: pip install gdown.
set -euo pipefail
size='' folder=data/webshop nouns=''
for argument; do
    case $argument in
        --size=small | --size=all) size=${argument#*=} ;;
        --folder=?*) folder=${argument#*=} ;;
        --nouns) nouns=yes ;;
        *)
            echo "error: unexpected argument '$argument'; allowed: --size=small, --size=all, --folder=DIR, --nouns" >&2
            exit 2
            ;;
    esac
done
if [[ -z $size ]]; then
    echo "error: --size is missing; allowed: small, all" >&2
    exit 2
fi
[[ $folder == /* ]] || folder=$PWD/$folder
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
command -v gdown >/dev/null || turnppo_fail "gdown is not on PATH; pip install gdown brings it"

fetch() { # name, id; a file is whole or absent
    local file=$folder/$size/$1
    if [[ ! -e $file ]]; then
        turnppo_say "fetching $1"
        gdown "https://drive.google.com/uc?id=$2" -O "$file.part" && [[ -s $file.part ]] ||
            turnppo_fail "gdown could not fetch $1; its message is above (Drive limits downloads a day: try again later)"
        mv "$file.part" "$file"
    fi
}

mkdir -p "$folder/$size"
if [[ $size == small ]]; then
    fetch items_shuffle_1000.json 1EgHdxQ_YxqIQlvvq5iKlCrkEKR6-j0Ib
    fetch items_ins_v2_1000.json 1IduG0xl544V_A_jv3tHXC0kyFi7PnyBu
else
    fetch items_shuffle.json 1A2whVgOO0euk5O13n2iYDM0bQRkkRduB
    fetch items_ins_v2.json 1s2j6NgHljiZzQNL3veZaAiyW_qDEgBNi
fi
fetch items_human_ins.json 14Kb5SPBk_jfdLZ_CDBNitW98QLDlKR5O
if [[ -n $nouns && ! -e $folder/$size/title_nouns.json.gz ]]; then
    "$PYTHON" -m envs.webshop.tag_nouns "$folder/$size"
fi
exec "$PYTHON" -m envs.webshop.build "$folder/$size"
