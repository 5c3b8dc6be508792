package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func textFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

const passwd = "root:x:0:0:root:/root:/bin/sh\nbroken line\ndev:x:1000:1001:,,,:/home/dev:/bin/sh\nhuge:x:4294967295:1:::\n"

func TestUsersAreFoundInTheSandboxsOwnFiles(t *testing.T) {
	u := users{passwd: textFile(t, passwd), groups: textFile(t, "dev:x:1001:\ndocker:x:7:root,dev\nother:x:8:developer\n")}
	for given, want := range map[string]account{
		"dev":     {name: "dev", home: "/home/dev"},
		"1000":    {name: "dev", home: "/home/dev"},
		"1000:5":  {name: "dev", home: "/home/dev"},
		"4242:17": {},
	} {
		found, err := u.find(given)
		if err != nil || found.name != want.name || found.home != want.home {
			t.Errorf("%s: %+v %v", given, found, err)
		}
	}
	if found, _ := u.find("dev"); found.UID != 1000 || found.GID != 1001 || !slices.Equal(found.Groups, []uint32{1001, 7}) {
		t.Errorf("%+v", found)
	}
	if found, _ := u.find("1000:5"); found.UID != 1000 || found.GID != 5 || found.Groups != nil {
		t.Errorf("%+v", found)
	}
	if found, _ := u.find("4242:17"); found.UID != 4242 || found.GID != 17 || found.env() != nil {
		t.Errorf("%+v", found)
	}
}

func TestUnknownOrImpossibleUserIsNamed(t *testing.T) {
	u := users{passwd: textFile(t, passwd), groups: "/none"}
	for given, words := range map[string]string{"nobody": "give uid:gid", "4242": "give uid:gid", "dev:5": "neither name, uid nor uid:gid",
		"1:x": `"x" is not a number`, "4294967295:0": "neither", "huge": "4294967295", ":": "neither"} {
		if _, err := u.find(given); err == nil || classify(err).status != 400 || !strings.Contains(err.Error(), words) || !strings.HasPrefix(err.Error(), "user: ") {
			t.Errorf("%s: %v", given, err)
		}
	}
	u.passwd = "/none"
	if _, err := u.find("root"); err == nil || !strings.Contains(err.Error(), "no line in /none") {
		t.Error(err)
	}
}

func TestSandboxWithOneUserSaysSo(t *testing.T) {
	all, one := textFile(t, "         0          0 4294967295\n"), textFile(t, "         0       1000          1\n")
	capable, bare := textFile(t, "CapPrm:\t0\nCapEff:\t00000000000000c0\n"), textFile(t, "CapEff:\t0000000000000080\n")
	for name, world := range map[string]struct{ uidMap, status, want string }{
		"possible": {all, capable, ""}, "one id": {one, capable, "single user id"}, "no right": {all, bare, "lacks CAP_SETUID or CAP_SETGID"},
	} {
		if got := whyOneUser(world.uidMap, world.status); (got == "") != (world.want == "") || !strings.Contains(got, world.want) {
			t.Errorf("%s: %q", name, got)
		}
	}
	_, err := users{refusal: "this sandbox has a single user id"}.find("root")
	if err == nil || !strings.Contains(err.Error(), `user: "root" is refused: this sandbox has a single user id; leave user out`) {
		t.Error(err)
	}
}
