package pristine

import (
	"os"
	"regexp"
	"strconv"
	"strings"
)

const mountTable = "/proc/self/mountinfo"

var octal = regexp.MustCompile(`\\[0-7]{3}`)

// mount is one line of the mount table.
type mount struct {
	place, kind string
	writable    bool
}

func readMounts() ([]mount, error) {
	table, err := os.ReadFile(mountTable)
	if err != nil {
		return nil, err
	}
	var all []mount
	for line := range strings.Lines(string(table)) {
		left, right, found := strings.Cut(line, " - ")
		fields, tail := strings.Fields(left), strings.Fields(right)
		if !found || len(fields) < 6 || len(tail) < 3 {
			continue
		}
		all = append(all, mount{
			place: octal.ReplaceAllStringFunc(fields[4], unescape), kind: tail[0],
			writable: hasOption(fields[5], "rw") && hasOption(tail[len(tail)-1], "rw"),
		})
	}
	return all, nil
}

// otherLine is the first line that only one of two tables has.
func otherLine(before, after []byte) string {
	for _, pair := range [][2]string{{string(after), string(before)}, {string(before), string(after)}} {
		for line := range strings.Lines(pair[0]) {
			if !strings.Contains("\n"+pair[1], "\n"+line) {
				return strings.TrimSpace(line)
			}
		}
	}
	return "in its order"
}

func unescape(code string) string {
	n, _ := strconv.ParseUint(code[1:], 8, 8)
	return string([]byte{byte(n)})
}

func hasOption(options, wanted string) bool {
	return strings.Contains(","+options+",", ","+wanted+",")
}

func mountPoints() ([]string, error) {
	all, err := readMounts()
	places := make([]string, 0, len(all))
	for _, m := range all {
		places = append(places, m.place)
	}
	return places, err
}
